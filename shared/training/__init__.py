"""Training: a model learns a text, in steps that can be resumed exactly.

    recipe.py      steps, rates, the optimizer, and the seed of each draw
    trainer.py     one step after another, evaluated now and then
    processes.py   rank, world size and reductions over processes
    run_folder.py  the folder of a run: its log and checkpoints, the resume
    loss_curve.py  the losses as a picture
    make_small_model.py  trains the small model that comes with the kit

The command gpt-duet train is cli/train.py.
"""
