#!/bin/sh
# Four ranks on one node, as SLURM starts them: sbatch examples/slurm.sh
#SBATCH --job-name=fluidx
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --requeue

export FLUIDX_TIMEOUT=300
# What is written goes on from its last checkpoint when SLURM puts the job into its queue again. srun has to be told how many cores a rank has.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --output="slurm-%j-rank%t.txt" python examples/launched.py --steps 10000 --folder "run-$SLURM_JOB_NAME"
