"""Apply the rules: optimizers, transforms, groups and initial sizes."""
