"""The stages of a pipeline planned: what each costs on each sub-mesh, the search over these, the plan."""
