"""How work is done: in the background, compiled, counted, with the garbage collector put off."""
