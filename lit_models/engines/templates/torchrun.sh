#!/bin/bash
# {{ name }}, {{ resources }}
# Written by `unisono submit`. Start it on each machine, from the folder where that was called, which
# all of them see:
#   bash {{ path }}
# Machines may come later, leave and come back: the run goes on from its newest checkpoint. So does
# the same line after all of them have ended.

{% include "launch.sh" %}
