"""stio where models are trained and served: one module for each framework, which imports that framework only."""
