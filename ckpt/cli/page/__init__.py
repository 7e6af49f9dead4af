"""The page that `ckpt report` writes: markup, scales, one room per picture, and the page they stand on."""
