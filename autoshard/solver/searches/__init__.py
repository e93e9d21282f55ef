"""Published ways to search, as peers of the solver's own: each is one function on a `Problem`."""
