"""``policy.exact_on_policy``: the learner and the embedded engine compute the same bits for a token, whatever is in the same batch.

A token's log-probability depends on the shape of the call that computes it: a product of 1 row and one of 1,000 rows may add in another
order, vectorised functions treat the last few elements of an array otherwise, and attention adds up as many keys as there are. Here every
such step has one order of additions, that of a reference shape, and a faster shape is used only after it has been compared with it bit
for bit on this machine.
"""
