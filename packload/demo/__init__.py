"""The demo: movie reviews classified by a transformer, in padded and in packed batches.

``packload demo`` runs it (`packload.demo.run.run`). `data` reads the reviews, `model` is the classifier,
`train` the training steps, `memory` what they take, `report` the printed table and the picture.
"""
