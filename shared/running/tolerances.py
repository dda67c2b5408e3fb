"""All numerical tolerances, each defined once, in three kinds.

- Nudges measure rounding: weights are changed in their last bits, or a run is
  compared with the same run in float64. A bound is a multiple of the noise.
- Floors are numbers of units of rounding, `torch.finfo(dtype).eps`, of the
  largest number compared. A difference up to a floor is ignored.
- Shares are for numbers whose unit of rounding is not known, as a model may
  compute in any dtype inside. They are shares of a size, or of the spread
  (the standard deviation) of the scores.

A name ends in what it counts: UNITS of rounding, NOISES that were measured, a
SHARE of a size or of the SPREAD, NATS of a log-probability. The check and the
diff with their own broken models are the test of a number: change one here,
and run both.
"""

import torch

# --- Nudges: what rounding does to a model is measured -----------------------

NUDGE_UNITS = 256  # of each weight, at most: rounding changes, a leak does not
NUDGE_UNITS_OF_16_BITS = 2  # 256 units of bfloat16 are twice the weight
STEADY_SHARE = 0.2  # of a real difference: it changes no more under the nudge
NUDGE_NOISES = 16  # a larger multiple of what a nudge changes is not rounding
NUDGE_NOISES_OF_16_BITS = 4  # the same of 16 bits
MEASURED_NOISES = 8  # the same of a run's distance from its run in float64
FRESH_SCORER_BOUNDS = 16  # fresh scorers may be trained, which adds rounding

# --- Floors: units of rounding of the largest number -------------------------

FLOOR_UNITS = 64  # a smaller difference is ignored, and no weight is nudged
FLOOR_UNITS_OF_16_BITS = 2  # 64 units of bfloat16 are half the number
# of a function, whose weights the kit cannot nudge
FLOOR_UNITS_WITHOUT_WEIGHTS = {torch.float64: 2**20, torch.float32: 2**8}
FLOOR_UNITS_WITHOUT_WEIGHTS_OF_16_BITS = 16
PRINTED_UNITS = 2  # of the last digit that a program prints: it rounds both
UNNUDGED_UNITS = 2**12  # of a value in the diff, where no weight is nudged
RECORDED_UNITS = 2**9  # of an array of a file; GELU and tanh's differ by more
MEASURED_UNITS = 4  # of a value whose noise is measured against float64
MEASURED_UNITS_OF_16_BITS = 1  # the same of 16 bits
DROPPED_UNITS = 8  # of the largest number that dropout may set to 0
OWN_UNITS = 4  # of a coarser dtype that a value itself rounds by
DIGEST_UNITS = 16  # of 16 bits: digests whose values are compared
FINE_UNIT = 2.0**-40  # a smaller unit of rounding hides no fault
FLOORS_IN_DOUBT = 1.5  # times what passes as rounding: more is not rounding
GRADIENT_UNITS = 2**10  # of the largest number of a gradient
GRADIENT_UNIT_AT_MOST = 2.0**-16  # 2**10 of coarser units hide a fault
PLACED_UNITS = 2**9  # sums in another order, as ranks add them up
PLACED_UNITS_OF_FLOAT64 = 2**16  # a fault is never as small

# --- Shares: the unit of rounding is not known -------------------------------

FLOAT32_SHARE = 1e-6  # of a value: eight units of float32, which may be inside
INSIDE_EXPONENT = 2 / 3  # of a unit of rounding: inside a model it adds up
DIGEST_SHARE = 1e-3  # of a value's size: digests whose values are compared
MARKS_SHARE = 1e-5  # of a size: order statistics that differ by a factor only
FACTOR_SHARE = 1e-6  # a factor as near to 1 is not a factor
ROOT_SHARE = 1e-5  # a factor as near to a root is the root
DROPPED_SHARE = 1e-4  # of the largest number that dropout may set to 0
RECORDED_SCORES_SHARE = 0.05  # of a size: recorded scores that are the run's
SUM_SHARE_IN_16_BITS = 0.02  # sums of probabilities are as near to 1
SPREAD_OF_A_RIGHT_WAY = 1e-3  # near enough to choose a way to decode
SPREAD_OF_AN_IDLE_MASK = 1e-4  # a mask that hides nothing changes no more
SPREAD_OF_ANOTHER_PROGRAM = 1e-2  # a larger share is not rounding of float32
SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS = 0.3  # the same of 16 bits
LOSS_SHARES = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
}  # relative to 1 + loss
LOSS_SHARE_OF_16_BITS = 1e-2
SPLIT_LOSS_SHARE = 1e-3  # a loss of two places is the mean of their losses
TERM_SHARE = 1e-6  # of the loss: terms of two losses that are the same
TERM_SHARE_OF_THREE = 1e-5  # the same after a quotient of differences
SMOOTHED_SHARE = 1e-4  # of a smoothed share: it is a quotient of differences
RANK_GRADIENT_SHARE = 1e-6  # one gradient on several ranks
GRADIENT_FLOOR_SHARE = 1e-3  # of the largest: a key's bias has rounding only
NORMALISED_NATS = 1e-4  # of logsumexp: scores that are log-probabilities
STYLE_NATS_IN_FLOAT64 = 1e-12  # the two styles are 3.6e-15 apart
STYLE_NATS = 1e-6  # below float64, added to the errors of both styles
