"""Code that `Plan.to_code` wrote, run."""


def defined(code, name="written"):
    """What the code defines, as a module of this name."""
    names = {"__name__": name}
    exec(compile(code, f"{name}.py", "exec"), names)
    return names
