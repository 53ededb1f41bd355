"""The table: for each kind of operation, its rule."""

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow import products, shapes
from redco_eqx._dataflow.walk import Rule
from redco_eqx._jaxprs import NOT_ELEMENTWISE, called

RULES: dict[str, Rule] = {
    "dot_general": products.dot_general,
    "ragged_dot_general": products.ragged_dot,
    "conv_general_dilated": products.convolution,
    "transpose": shapes.transpose,
    "reshape": shapes.reshape,
    "squeeze": shapes.squeeze,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "slice": shapes.slice_,
    "split": shapes.split,
    "stack": shapes.stack,
    "unstack": shapes.unstack,
    "concatenate": shapes.concatenate,
    "pad": shapes.pad,
    "tile": shapes.tile,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "gather": shapes.gather,
    "scan": products.scan,
    "while": products.while_,
    "cond": products.cond,
    "custom_linear_solve": products.linear_solve,
    "add": shapes.add,
    "add_any": shapes.add,
    "convert_element_type": shapes.convert,
    "copy": shapes.copy,
    "fft": shapes.fft,
    "optimization_barrier": shapes.each_alone,
    "top_k": shapes.last_dims(1),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), shapes.scatter),
    **dict.fromkeys(("scatter_add", "scatter_mul", "scatter_min", "scatter_max"), shapes.scatter),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce"), shapes.reduce),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), shapes.reduce),
    **dict.fromkeys(("psum", "pmax", "pmin"), shapes.reduce),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max"), shapes.window),
    **dict.fromkeys(("reduce_window_min", "select_and_gather_add", "select_and_scatter_add"), shapes.window),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), shapes.along_one_dim),
    **dict.fromkeys(("sort", "rev"), shapes.along_one_dim),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "eigh", "eig", "svd"), shapes.last_dims(2)),
    **dict.fromkeys(("qr", "geqrf", "householder_product", "schur", "hessenberg"), shapes.last_dims(2)),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), shapes.last_dims(1)),
    **dict.fromkeys(("iota", "random_bits", "random_seed", "random_wrap"), shapes.unrelated),
    **dict.fromkeys(("random_unwrap", "random_split", "random_fold_in"), shapes.unrelated),
    **dict.fromkeys(("random_gamma", "rng_bit_generator", "threefry2x32"), shapes.unrelated),
}


def rule_of(equation: JaxprEqn) -> Rule:
    """The rule of an operation; a call is entered, and what is not known is looked at."""
    name = equation.primitive.name
    rule = RULES.get(name)
    if rule is not None:
        return rule
    is_call = name not in NOT_ELEMENTWISE and called(equation) is not None
    return products.call if is_call else shapes.unlisted
