"""Elements with knobs: JavaScript modules that the report and JupyterLab share.

``js`` holds a module for each element. Its ``compute`` is a pure function of the knobs and of data, and the tests hold
it to the Python reference. Its ``render({model, el})`` has anywidget's interface. `data` computes the data from the
library and the committed records, `page` makes an element HTML for a page of the report, and `notebook` shows it in
JupyterLab.
"""
