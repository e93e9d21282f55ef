"""The ways to run a step, all of which compute the same, in; the one that is predicted to be fastest out."""
