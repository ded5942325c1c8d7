"""Which relations each score can express: what is proved, and what weights by hand show.

Where a relation is not learned, expression or learning is missing. These are the reasons for a "-",
at any parameters and any D (what a score cannot do for one query, the softmax cannot add, and
monotone functions of logits change nothing):

*   affine: for one query the score is a monotone function of an affine function of the key. On a
    line it neither peaks nor dips. Only inner and bilinear do neither: nearest, manhattan, cosine
    and predecessor peak on some lines, farthest and longest dip. The even keys of parity have the
    same centre as the odd ones, so that not all even keys can be above all odd ones.
*   convex: the score is a monotone function of |affine|. It does not peak; and it is constant on
    planes, so that it cannot dip on all lines through a point, as farthest and longest do.
*   concave: the score is a monotone function of a concave function of the key. It does not dip;
    cosine dips too, on lines behind the query.
*   sum: the score is a monotone function of a(q) . k + c(q) h(k), c > 0. Then h alone decides
    whether the sum over even keys is above that over odd keys, whatever the query's parity.
*   quadric: the keys of one logit lie on a quadric. It has no corner, as the sets of equal
    manhattan have, and contains a cone with its mirror image, where the cosine has another sign.
*   symmetric: on each line the score is a parabola, so that it falls behind its peak no faster
    than it rose before. Predecessor falls at once.
*   sign: a cosine of affine projections is above t(q) where a(q) + b(q) . k > t(q) |k'|. Summed
    over even and over odd keys, this gives a(q) one sign for all even and the other for all odd
    queries. But a is affine times a positive number, and even and odd queries have the same centre.
*   kinks: the logits are linear in the key except at 4 hyperplanes. Through any point of R^4 there
    is a ray along which such logits are constant, or a line along which they are linear. They
    neither peak nor dip there in all directions, as nearest, manhattan, farthest and longest do.
*   yat: the keys of one logit lie on (a + b . k)^2 = c |k' - q'|^2. These are concentric spheres
    only if b = 0, and then the logit falls with the distance.
"""

# Of each relation, in this order: "+" weights are known, exact or in a limit; "-" there are none
# (the docstring says why); "." neither is known, or more features than D come nearer.
EXPRESSION = {
    **dict.fromkeys(("dot", "general", "scaled", "softcap", "softplus"), "++-------"),  # affine
    **dict.fromkeys(("cosine", "ngpt"), "+++++-+.-"),  # quadric, sign
    **dict.fromkeys(("distance", "l2", "elliptical"), "++-+-----"),  # concave to symmetric
    **dict.fromkeys(("additive", "concat"), "++.++.+++"),
    **dict.fromkeys(("manhattan", "tropical"), "..-.-+-++"),  # concave
    "hyperbolic": "++-+---.-",  # concave, sum, quadric
    "neural": ".....+.++",
    "power": "++------+",  # convex
    "yat": "++-+---.+",  # quadric, yat
    "indexer": "++.----++",  # kinks
}
