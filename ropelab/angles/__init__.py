"""The angle by which each pair turns: from a model's configuration to frequencies, tables, or the table-free form.

Read the files in this order:

1. `frequencies` computes the angle that each pair turns by per position, for every published variant.
2. `tables` computes the cosines and sines of all positions from the frequencies, once, for all layers.
3. `table_free` brings frequencies into the form from which the kernels compute cosines and sines without a table.
4. `rope_parameters` holds `Rope`, which joins the frequencies with the layout and the other choices of a model, and
   makes tables or the table-free form.
5. `model_config` reads a `Rope` from the configuration of a model.

`ropelab.positions` says which row of the tables a token reads.
"""
