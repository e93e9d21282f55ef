"""A step on a batch that devices do not divide: the same step on a padded batch, with the same results."""
