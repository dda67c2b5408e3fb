"""Train a model on a text, in steps that can be resumed exactly.

    recipe.py      steps, rates, the optimizer, and the seed of each draw
    trainer.py     takes steps, and evaluates at intervals
    processes.py   rank, world size and reductions over processes
    run_folder.py  the folder of a run: its log, its checkpoints, resuming
    loss_curve.py  draws the losses
    make_small_model.py  trains the small model that comes with the kit

The command gpt-duet train is in cli/train.py.
"""
