"""The part of the code of `Plan.to_code` that runs a step which changes nnx modules, as text: it imports flax.

It stands behind `standalone.py`, whose functions it calls. Modules are taken apart in
the order in which the step was traced for its plan (`program/modules.py`), so arguments and results have the numbers of
the table.
"""

CONSTRAINED_MODULES = '''
def constrained(step, mesh, static_argnums=None, static_argnames=None):
    """`step` with the layouts of the plan inside, to be given to `nnx.jit`. Its modules may lie anywhere at first.

    Arguments that are static for `nnx.jit` are to be named here, too.
    """
    return constrain_modules(step, mesh, _table(), static_argnums, static_argnames)
'''

EXPLICIT_MODULES = '''
def explicit(step, mesh, static_argnums=None, static_argnames=None):
    """`step`, to be given to `nnx.jit`. What it makes and changes has types of explicit mode; inside, axes are Auto.

    Call it under `jax.set_mesh(typed_mesh(mesh))`. Its modules may lie anywhere at first.
    """
    return constrain_modules(step, mesh, _table(), static_argnums, static_argnames, _types())


def _types():
    """Of what the step changes in modules and of what it returns, in this order."""
    return [
{types}    ]
'''

CONSTRAIN_MODULES = '''
def constrain_modules(step, mesh, table, static_argnums, static_argnames, types=None):
    """`step`, which changes nnx modules among its arguments, with the constraints of a table, and results of types."""

    def run(closed, leaves):
        if types is None:
            return constrained_results(closed, leaves, mesh, table)
        typed = jax.sharding.auto_axes(
            lambda *arrays: constrained_results(closed, arrays, mesh, table), axes=mesh.axis_names, out_sharding=types
        )
        return typed(*leaves)

    @functools.wraps(step)
    def constrained(*args, **keywords):
        check_static(step, args, keywords, table)
        traced, called = without_static(step, args, keywords, static_argnums, static_argnames)
        items, tree = jax.tree.flatten(traced, is_leaf=nnx.graph.is_graph_node)
        references = nnx.graph.RefMap()
        graphs, values, variables = _parts(items, references)
        leaves, structure = jax.tree.flatten(values)
        known = {}

        def flat(*arrays):
            """The step's flat results: what it puts into variables, and what it returns."""
            index = nnx.graph.IndexMap()
            inside = [
                value if graph is None else nnx.unflatten(graph, value, index_ref=index)
                for graph, value in zip(graphs, jax.tree.unflatten(structure, arrays))
            ]
            returned = called(*jax.tree.unflatten(tree, inside))
            made = nnx.graph.RefMap()
            left = jax.tree.leaves(_parts(inside, made)[1])
            results, known["result"] = jax.tree.flatten(returned, is_leaf=nnx.graph.is_graph_node)
            known["graphs"], found, _ = _parts(results, made)
            more, known["values"] = jax.tree.flatten(found)
            known["changed"] = [i for i, (new, old) in enumerate(zip(left, arrays)) if new is not old]
            return [*(left[i] for i in known["changed"]), *more]

        closed, _ = traced_as_planned(flat, plain_arguments(leaves, mesh, table), mesh, table)
        results = run(closed, leaves)
        changed = dict(zip(known["changed"], results))
        if changed:
            new = jax.tree.unflatten(structure, [changed.get(i, leaf) for i, leaf in enumerate(leaves)])
            inside = [value for graph, item in zip(graphs, new) if graph is not None for value in item]
            for variable, value in zip(variables, inside):
                variable.set_raw_value(value)
        index = nnx.graph.IndexMap.from_refmap(references)
        returned = jax.tree.unflatten(known["values"], results[len(changed) :])
        items = [
            value if graph is None else nnx.unflatten(graph, value, index_ref=index)
            for graph, value in zip(known["graphs"], returned)
        ]
        return jax.tree.unflatten(known["result"], items)

    return constrained


def _parts(items, references):
    """Per item its graph, None if it is no module, and what it holds; and all variables of modules."""
    graphs, values, variables = [], [], []
    for item in items:
        graph = None
        if nnx.graph.is_graph_node(item):
            graph, state = nnx.flatten(item, ref_index=references, graph=True)
            variables += state.leaves
            item = [variable.get_raw_value() for variable in state.leaves]
        graphs.append(graph)
        values.append(item)
    return graphs, values, variables
'''
