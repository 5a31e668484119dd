"""The benchmarks: each row beside its peer in the same run, as a ratio of medians.

``python -m benchmarks`` lists the rows, ``python -m benchmarks NAME…`` runs some, ``python -m benchmarks all`` runs
them all. What a run found is written to ``benchmarks/results/``, met or not.
"""

# General layout:
#
#   stats.py      the middle of samples, their spread, ratios of pairs
#   harness.py    rows, goals, figures, verdicts; A B A B; a limit on every run
#   record.py     JSON and the Markdown table in results/
#   machine.py    cores, memory, kernel, disk, versions, and how busy the machine was with other things
#   procs.py      processes we started: their processor time and memory, and their end, by process id
#   load/         the load generator, one process, the same code for both sides
#   peers/        what we measure against: etcd, Slurm, ray, and a null server that shows the generator's own ceiling
#   ours.py       our side: an office in a folder of its own, and the requests it is sent
#   holding.py    a bare holder: leases, guests under them, and the news of their end
#   rows/         one file per row, goals stated in it
#
# What is not there is not measured, and the result says so. Peers come from the distribution (etcd-server, slurm-wlm);
# numpy and ray are installed into environments that go with the row, or stay in SUBLET_BENCH_VENVS for the next run.
# Rows about guests say more as root: profile `tenant` and Slurm's daemons need it.
