"""stio inside other people's programs: what they ask for by their own interfaces, on stio's loading."""
