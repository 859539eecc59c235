"""A model, its optimizer and the settings, checked and drafted before anything is changed.

Modules, lowest first:

spans                   what lies where in memory
reached                 what a model reaches
aliases                 what shares a parameter's memory, and would not be trained with it
preparation             model, optimizer and settings examined together
float8_layers           layers that multiply in 8 bits, on a device that may not
checks                  everything else that is refused
arrangement             how the program arranges the ranks
unit_drafts             units before they are built
"""
