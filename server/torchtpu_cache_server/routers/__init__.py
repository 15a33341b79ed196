"""Router factories: each takes what it needs and returns the routes; none holds state of its own."""
