# SPDX-License-Identifier: LGPL-2.1-or-later

"""Renders the report of msa-report, as text and as a page of HTML."""
