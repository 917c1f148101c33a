"""Plan a promise before anything is trained: which noise keeps it over all rounds, and what it is expected to cost.

python examples/plan_a_run.py
"""

from gradveil import PlannedRun
from gradveil.privacy.plan import Plan, z_run_of

run = PlannedRun(records=200, batch_size=None, epochs=1, rounds=100, participations=10, cohort=20)
for epsilon in (1.0, 3.0, 8.0):
    z = z_run_of(epsilon=epsilon, delta=1e-5) * run.uses**0.5  # of one release
    plan = Plan(run, z, tier="aggregate", parameters=7_850)
    print(
        f"epsilon {epsilon:g}: z = {z:.2f} a release, {plan.client_z:.2f} of it by each client, "
        f"noise to signal {plan.noise_to_signal:.2f}, cheap from a cohort of {plan.cheap_from}"
    )
