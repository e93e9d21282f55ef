"""A train step cut into the stages of a pipeline, and run: one program per stage for each kind of task."""
