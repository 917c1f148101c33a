"""The paper's defence whole: Sun et al. 2020, "Provable Defense against Privacy Leakage in Federated Learning".

In the order of the paper's equations:

1. A layer's weight gradient is the mean of δ rᵀ (equations 1, 2); r = f(x) and its Jacobian, any model a tape of linear
   maps: ``jacobian.py``, ``recorder.py``, one rule for each kind of layer in ``rules``.
2. Hide what moves the input most, max ||X - X′||_p subject to ||r - r′||_q ≤ ε (equations 3 to 8): ``selection.py``.
3. Algorithm 1, the score |r_i| / ||∂r_i/∂x||₂ of each entry: ``scores.py``, by the norms of rows in ``rows.py``; the
   same faster, compiled for CPUs in ``cpu_kernel.py`` and as products of matrices for CUDA in ``matrices.py``.
4. Algorithm 2, the gradient built from r′: ``gradveil.protection.passes``, taken by ``gradveil.defenses``.
5. Theorem 1 (equation 9), as printed and made sound: ``certify.py``, for f as a chain of known steps (``problem.py``),
   by their norms and rounding (``norms.py``) and by bounds over boxes (``intervals.py``); and from a wanted error back
   to how many entries.
6. Theorem 2 serves the paper's reproduction alone: ``gradveil_studies.paper.theorem2``.
"""
