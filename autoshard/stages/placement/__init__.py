"""Which stage each equation of a step belongs to, and which values its programs keep: minimum cuts, mostly."""
