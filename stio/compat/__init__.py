"""Drop-in modules: the names and contracts of neighbouring libraries, on stio's own reading and writing."""
