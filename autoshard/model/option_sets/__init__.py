"""Which strategies and layouts a problem offers: all, or, on meshes of many axes, those that can be worth it."""
