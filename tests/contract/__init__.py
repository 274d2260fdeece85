# SPDX-License-Identifier: LGPL-2.1-or-later

"""What all commands promise, as tables: a row for each command, shapes of its JSON."""
