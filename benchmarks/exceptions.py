"""Why predictions of `benchmarks/strangers.py` are off: per kind of exception one sentence.

A reason belongs to a pattern of "machine family form" and a bar. It was read from compiled programs of that kind. What
no pattern fits was not looked into. The page says so, and gives what figures that are too low, or too high, had in
common on that machine in the programs that were read.
"""

import fnmatch

FIRST_LATENCY = 1e-5  # s; what estimates of GPU programs have at least that wait for a collective of a few bytes

NOT_READ = "not looked into; likely: "
_FROM_THE_START = "XLA for CPU runs first what waits for the least, and holds what it gathers of a batch from the start"

KNOWN: dict[tuple[str, str], str] = {  # (pattern of "machine family form", bar) -> why predictions are off
    ("* check *", "collectives"): "XLA drops what is only checked; the plan gathers it",
    ("* check *", "seconds"): "XLA drops what is only checked",
    ("* check *", "peak"): "XLA drops what is only checked",
    ("* layout_constraint *", "*"): "an order of dims in memory that the program asks for is copied, or kept whole",
    (
        "* bc[os]*",
        "collectives",
    ): "indices of sparse rows are gathered once for several scatters, or rows not scattered",
    ("* conjugate gradients *", "collectives"): "a vector of a few numbers is gathered after its loop",
    ("* new_ref *", "*"): "a reference holds many values in turn, and a layout belongs to one",
    ("* get *", "seconds"): "a reference is copied when it is made, unless XLA sees that nobody writes to it",
    ("* compute_on *", "*"): "what a host computes goes through buffers that no row of facts has",
    ("* name *", "*"): "a number that only has a name is copied",
    ("* platform_index *", "seconds"): "what the branch of the platform makes is one operation with what reads it",
    ("v5e:2x4 eigh *", "peak"): "complex matrices are rotated in a loop, some of whose parts lie outside the chip",
    ("v5e:2x4 recurrence *", "seconds"): "a product that is the same in every turn runs once, before the loop",
    ("* sin *", "peak"): "of one value that is returned twice XLA makes a second buffer",
    ("* iota_2x32_shape *", "peak"): "of one value that is returned twice XLA makes a second buffer",
    ("v5e:2x4 reduce_precision *", "seconds"): "a number that is rounded alone is an operation, and no scalar work",
    ("v5e:2x4 pad *", "*"): "the parts of complex numbers are padded apart, and small pads copied in another order",
    ("v5e:2x4 tridiagonal_solve *", "*"): "a loop over rows works with numbers whose count depends on the batch",
    ("v5e:2x4 svd *", "*"): "rotations of a batch of matrices hold copies that no row of facts has",
    ("v5e:2x4 lu *", "peak"): "permutations of a batch lie in whole rows of 128 numbers",
    ("v5e:2x4 running statistics *", "peak"): "sums of an associative scan lie outside the chip, padded to 128 columns",
    ("v5e:2x4 rng_bit_generator *", "*"): "words of a batch of generators are stored one by one, padded",
    ("v5e:2x4 pallas_call *", "seconds"): "a kernel in a batch runs as a loop over the batch",
    ("v5e:2x4 cum* gradient", "seconds"): "slices of an associative scan are operations of their own",
    ("v5e:2x4 split *", "seconds"): "each part of a split is an operation, and one in another order a copy",
    ("v5e:2x4 tile *", "seconds"): "a repeated dim is summed in another order, after a copy",
    ("v5e:2x4 scan*", "seconds"): "slices and stacks of arrays whose batch is minor are copied in every turn",
    ("* broadcast_in_dim *", "seconds"): "a result that is an argument is copied",
    ("v5e:2x4 fixed point *", "seconds"): "whether a loop in a batch goes on is computed three times",
    ("h100:1x8 igamma*", "seconds"): "loops until the last element has settled count as one FLOP per element",
    ("h100:1x8 *gamma samples *", "seconds"): "loops until the last element has settled count as one FLOP per element",
    ("h100:1x8 poisson samples *", "seconds"): "loops until the last element has settled wait for a reduction per turn",
    ("h100:1x8 cum*", "seconds"): "an associative scan reads its slices from the cache",
    ("* graph messages *", "*"): "rows that are gathered and scattered at once are stored once",
    ("cpu approx_top_k *", "peak"): "XLA sorts small operands in place",
    ("cpu attention *", "peak"): "XLA's YNN kernel for attention stores no scores",
    ("cpu bc[os]* batch*", "peak"): _FROM_THE_START,
    ("cpu todense batch*", "peak"): _FROM_THE_START,
    ("* bc[os]*", "peak"): "searches and scatters of sparse rows hold copies and numbers without a row of facts",
    ("* bc[os]*", "limit"): "searches and scatters of sparse rows hold copies and numbers without a row of facts",
    (
        "* stop_gradient *",
        "peak",
    ): "a result that only repeats a number is made in the layout of an argument",
    ("cpu graph messages *", "peak"): "rows that are gathered and scattered at once are stored once",
    ("* platform_index *", "peak"): "what the branch of the platform makes is one operation with what reads it",
    ("v5e:2x4 cum* gradient", "peak"): "slices of one element are temporaries of 16 KiB each",
    ("v5e:2x4 [gl]e *", "peak"): "the parts of complex numbers are temporaries of 16 KiB each",
    ("v5e:2x4 cond*", "seconds"): "a batch of conditions computes all branches, in more operations",
    ("v5e:2x4 conv*", "seconds"): "kernels of few channels fill little of the matrix unit",
    ("* dce_sink *", "*"): "XLA drops what goes into the sink",
    ("v5e:2x4 real *", "seconds"): "XLA notes no time where complex numbers are put together",
    ("v5e:2x4 *top_k *", "peak"): "a sort in the place of a call works with numbers of 16 KiB each",
    ("v5e:2x4 scatter*", "peak"): "updates that XLA writes one by one are numbers of 16 KiB each",
    ("v5e:2x4 scatter*", "seconds"): "updates that XLA writes one by one are operations of their own",
    ("v5e:2x4 gather *", "peak"): "rows that XLA picks one by one are numbers of 16 KiB each",
    ("v5e:2x4 gather *", "seconds"): "what a gather reads and makes is copied between layouts",
    ("v5e:2x4 while *", "peak"): "the result of a loop in a batch is copied from where the loop has it",
    ("v5e:2x4 fixed point *", "peak"): "whether a loop in a batch goes on is three numbers of 16 KiB",
}

_GENERAL: dict[tuple[str, str, bool], str] = {  # machine, bar, whether too little is predicted -> what is common
    ("v5e:2x4", "peak", True): "small temporaries of 16 KiB each, or copies in another order, have no row of facts",
    ("v5e:2x4", "peak", False): "XLA keeps in the chip, or makes in another buffer, what is counted outside",
    (
        "v5e:2x4",
        "seconds",
        True,
    ): "XLA makes more operations of it, each of 1.2 us: copies, slices and index arithmetic",
    ("v5e:2x4", "seconds", False): "XLA makes fewer operations of it: it folds constants, or fuses neighbours",
    ("h100:1x8", "peak", True): "a library's workspace, or a copy in another order, has no row of facts",
    ("h100:1x8", "peak", False): "XLA writes in place, or fuses, what is counted as a temporary",
    (
        "h100:1x8",
        "seconds",
        True,
    ): "XLA makes several kernels of it that hand on through memory; all is far below a launch",
    ("h100:1x8", "seconds", False): "XLA makes one kernel of several operations; all is far below a launch",
    ("cpu", "peak", True): "a library's workspace, or a loop's copy, has no row of facts",
    ("cpu", "peak", False): "XLA writes in place, or fuses, what is counted as a temporary",
}
_ALONE = "a collective of a few bytes waits for its whole latency, of which only a part is counted"
_SENT = {True: "XLA's partitioner gathers what the plan leaves split", False: "XLA leaves out what the plan sends"}


def reason_of(what: str, bar: str, predicted: float, compiled: float) -> str:
    """Why a row misses a bar.

    Args:
        what: "machine family form".
        bar: which.
        predicted: the figure.
        compiled: what the compiler has instead.
    """
    for (pattern, of), why in KNOWN.items():
        if fnmatch.fnmatchcase(bar, of) and fnmatch.fnmatchcase(what, pattern):
            return why
    machine, is_low = what.split()[0], predicted < compiled
    if bar == "collectives":
        return NOT_READ + _SENT[is_low]
    if (machine, bar) == ("h100:1x8", "seconds") and is_low and compiled > FIRST_LATENCY:
        return _ALONE
    return NOT_READ + _GENERAL[machine, bar, is_low]
