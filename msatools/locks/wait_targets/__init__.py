# SPDX-License-Identifier: LGPL-2.1-or-later

"""Wait targets of tasks, as reported by msa-prstat."""
