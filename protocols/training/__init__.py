"""What all training protocols share: tasks, data, models, the local trainer, and models as named tensors.

It knows nothing of networks or state machines. This package alone doesn't import torch; its modules that need it say so
(`MissingExtra`) when they are imported.

============  ====================================================================================
`task`        `Task`: what is trained
`loading`     `load_task`: a task by its name, shipped or a user's own; `check_task`
`trainer`     `Trainer`: local optimizer steps on one peer's data
`evaluation`  `evaluate`: a model's metrics on held-out data
`tensors`     a model as a map of named tensors, and whether two models are the same
`checkpoint`  models and optimizers in files
`data`        `Data`, and how it is dealt to peers
`datasets`    the shipped data sets as arrays
`models`      the shipped tasks' networks
`shipped`     the shipped tasks
============  ====================================================================================
"""
