"""`mesh="auto"`: devices in, the mesh over them on which the step is the fastest out."""
