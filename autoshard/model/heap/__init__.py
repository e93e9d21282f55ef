"""Where XLA puts what a step holds: which temporaries need no room of their own in the heap."""
