// SPDX-License-Identifier: LGPL-2.1-or-later

/*
 * Walks over the kernel's own tables of types and symbols: BTF and kallsyms. btf.py and
 * kallsyms_tables.py have the same walks in Python, and describe the formats. The data is
 * untrusted: each offset is compared with the size of its table before its use.
 *
 * Loaded by native.py; all memory is the caller's.
 */

#include <stdint.h>
#include <string.h>

#define NONE UINT32_MAX

/* Bytes of a copy; few tokens are longer. */
#define SHORT 16

/* Bytes of a name, with its NUL: KSYM_NAME_LEN, which the kernel holds BTF to as well. */
#define NAME_LEN 512

/* To be changed with the arguments of any function here, and in native.py. */
int64_t msa_tables_version(void)
{
	return 1;
}

/*
 * Find the start, the name and the kind of each type in the words of a BTF section.
 *
 * fixed and entry have the number of words of a type of each kind: without its entries,
 * and of an entry; kinds is their size. starts, names and infos have room for n / 3 types.
 * Returns the number of types, or, if one is cut off or of an unknown kind, the negative
 * of its number, counted from 1.
 */
int64_t msa_walk_btf(const uint32_t *words, int64_t n, const int64_t *fixed,
		     const int64_t *entry, int64_t kinds, uint32_t *starts,
		     uint32_t *names, uint32_t *infos)
{
	int64_t types = 0, at = 0;

	while (at < n) {
		if (n - at < 3)
			return -(types + 1);
		uint32_t info = words[at + 1];
		int64_t kind = info >> 24 & 0x7f;
		/* Kind 0 is void, which has no record. */
		if (kind == 0 || kind >= kinds)
			return -(types + 1);
		starts[types] = (uint32_t)at;
		names[types] = words[at];
		infos[types++] = info;
		at += fixed[kind] + entry[kind] * (info & 0xffffff);
	}
	return at == n ? types : -types;
}

/*
 * Find the end of count names of kallsyms, and the offset of each 256th.
 *
 * wide says whether a length may have two bytes. Returns -1 if they are cut off, or if one
 * is empty.
 */
int64_t msa_walk_names(const uint8_t *names, int64_t size, int64_t count, int64_t wide,
		       uint32_t *markers)
{
	int64_t at = 0;

	for (int64_t i = 0; i < count; i++) {
		if (i % 256 == 0)
			markers[i / 256] = (uint32_t)at;
		if (at >= size)
			return -1;
		int64_t length = names[at++];
		if (wide && length & 0x80) {
			if (at >= size)
				return -1;
			length = (length & 0x7f) | (int64_t)names[at++] << 7;
		}
		if (!length || length > size - at)
			return -1;
		at += length;
	}
	return at;
}

/*
 * Expand names of kallsyms, which msa_walk_names() has found sound.
 *
 * Each byte of a name stands for a token: tokens has their text, and ends with a NUL; index
 * has the offset of each. A name's first letter is its symbol's type. starts gets the
 * offset of each expanded name, which ends with a NUL. Returns the size of the text; with
 * room 0, nothing is written. Returns -1 if room is too small or a token is not there.
 */
int64_t msa_expand_names(const uint8_t *names, int64_t count, int64_t wide,
			 const char *tokens, int64_t tokens_size, const uint16_t *index,
			 char *text, int64_t room, uint32_t *starts)
{
	int64_t lengths[256], at = 0, end = 0;
	uint8_t shorts[256];

	for (int i = 0; i < 256; i++) {
		if (index[i] >= tokens_size)
			return -1;
		lengths[i] = (int64_t)strlen(tokens + index[i]);
		shorts[i] = lengths[i] <= SHORT && index[i] + SHORT <= tokens_size;
	}
	for (int64_t i = 0; i < count; i++) {
		int64_t length = names[at++];
		if (wide && length & 0x80)
			length = (length & 0x7f) | (int64_t)names[at++] << 7;
		if (room)
			starts[i] = (uint32_t)end;
		for (; length; length--) {
			uint8_t token = names[at++];
			if (room) {
				if (lengths[token] >= room - end)
					return -1;
				/* A copy of a constant size takes no call. */
				if (shorts[token] && room - end >= SHORT)
					memcpy(text + end, tokens + index[token], SHORT);
				else
					memcpy(text + end, tokens + index[token],
					       (size_t)lengths[token]);
			}
			end += lengths[token];
		}
		if (room)
			text[end] = 0;
		end++;
	}
	return end;
}

/* FNV-1a, with the high bits folded in. */
static uint32_t hash(const char *name)
{
	uint32_t value = 2166136261u;

	for (; *name; name++)
		value = (value ^ (uint8_t)*name) * 16777619u;
	return value ^ value >> 15;
}

/*
 * Index names, but those that are too long: heads gets the first row of each chain, next
 * the row after each.
 *
 * text has size bytes and ends with a NUL; starts has the offset of each row's name in it,
 * or NONE. mask is the number of chains less one, which is a power of 2. Returns the number
 * of rows, or the negative of the first, counted from 1, whose name is not in the text.
 */
int64_t msa_index_names(const char *text, int64_t size, const uint32_t *starts,
			int64_t count, uint32_t *heads, uint32_t mask, uint32_t *next)
{
	for (int64_t i = 0; i < count; i++)
		if (starts[i] != NONE && starts[i] >= size)
			return -(i + 1);
	memset(heads, 0xff, ((size_t)mask + 1) * sizeof(*heads));
	/* Backwards, so that a chain ascends. */
	for (int64_t i = count - 1; i >= 0; i--) {
		if (starts[i] == NONE)
			continue;
		int64_t most = size - starts[i] < NAME_LEN ? size - starts[i] : NAME_LEN;
		if (!memchr(text + starts[i], 0, (size_t)most))
			continue;
		uint32_t chain = hash(text + starts[i]) & mask;
		next[i] = heads[chain];
		heads[chain] = (uint32_t)i;
	}
	return count;
}

/*
 * Find the rows of a name, ascending. Returns how many there are; at most room are written.
 */
int64_t msa_find_name(const char *text, const uint32_t *starts, const uint32_t *heads,
		      uint32_t mask, const uint32_t *next, const char *name,
		      uint32_t *rows, int64_t room)
{
	int64_t found = 0;

	for (uint32_t i = heads[hash(name) & mask]; i != NONE; i = next[i]) {
		if (strcmp(text + starts[i], name))
			continue;
		if (found < room)
			rows[found] = i;
		found++;
	}
	return found;
}
