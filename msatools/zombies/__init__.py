# SPDX-License-Identifier: LGPL-2.1-or-later

"""Why the dead are not reaped, and what they use up."""
