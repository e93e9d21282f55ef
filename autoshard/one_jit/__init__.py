"""The second backend of pipelines: equal stages of a scanned stack in one jitted program, in lockstep."""
