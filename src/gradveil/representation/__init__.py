"""The paper's defence whole: Sun et al. 2020, "Provable Defense against Privacy Leakage in Federated Learning".

In the order of the paper's equations:

1. A layer's weight gradient is the mean of δ rᵀ (equations 1, 2); r = f(x) and its Jacobian, any model a tape of linear
   maps: ``layers/jacobian.py``, ``layers/recorder.py``, one rule for each kind of layer in ``layers/rules``.
2. Hide what moves the input most, max ||X - X′||_p subject to ||r - r′||_q ≤ ε (equations 3 to 8): ``selection.py``.
3. Algorithm 1, the score |r_i| / ||∂r_i/∂x||₂ of each entry: ``scores/api.py``, exact and estimated norms of rows in
   ``scores/exact.py``; the same faster in ``scores/fast`` (compiled for CPUs, as matrices and as recordings for CUDA).
4. Algorithm 2, the gradient built from r′: ``gradveil.protection.passes``, taken by ``gradveil.defenses``.
5. Theorem 1 (equation 9), as printed and made sound: ``certificates/certify.py``, on chains of known steps
   (``chain.py``), their norms and rounding (``norms.py``), bounds over boxes (``intervals.py``); and from a wanted
   error back to how many entries.
6. Theorem 2 serves the paper's reproduction alone: ``gradveil_studies.paper.theorem2``.
"""
