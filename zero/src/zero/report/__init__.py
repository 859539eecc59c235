"""What a run did, as one HTML page that needs no network: `zero report RUN`, `engine.memory_report()`.

Modules, lowest first:

figures     pictures as Vega-Lite specifications
page        figures and tables as a page (page.html, .css, .js), with the library that draws them
timeline    the memory of one step
records     what `JsonLines` has written, read back
run_report  the page of a run
"""
