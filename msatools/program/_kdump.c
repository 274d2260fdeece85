// SPDX-License-Identifier: LGPL-2.1-or-later

/*
 * Decompression of the pages of a kdump: many in one call, each straight to its place.
 *
 * The blocks are untrusted: whatever is in one, nothing beyond it is read and nothing
 * beyond its page is written. A block counts only if it is whole, ends where it should,
 * and makes exactly one page; anything else is a lost page.
 *
 * The formats: zlib is RFC 1950 and 1951, LZO1X is Documentation/staging/lzo.rst of the
 * kernel's source, snappy is format_description.txt of its own; zstd is left to libzstd.
 * Loaded by kdump_pages.py.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Bytes that are copied at once, so that a copy may write as many too many. */
#define STEP 16

static inline uint64_t load64(const uint8_t *from)
{
	uint64_t value;

	memcpy(&value, from, sizeof(value));
	return value;
}

static inline void copy_step(uint8_t *to, const uint8_t *from)
{
	uint64_t low = load64(from), high = load64(from + 8);

	memcpy(to, &low, 8);
	memcpy(to + 8, &high, 8);
}

/*
 * Repeat the bytes that are distance before to. The caller has checked that they are in the
 * page, and that there is room for length bytes before end, where the page ends.
 */
static inline void copy_match(uint8_t *to, uint64_t distance, uint64_t length,
			      const uint8_t *end)
{
	uint64_t room = (uint64_t)(end - to);

	/* The usual case takes no branch that is hard to predict. */
	if (distance >= STEP && length <= 4 * STEP && room >= 4 * STEP) {
		const uint8_t *from = to - distance;

		copy_step(to, from);
		copy_step(to + STEP, from + STEP);
		if (length > 2 * STEP) {
			copy_step(to + 2 * STEP, from + 2 * STEP);
			copy_step(to + 3 * STEP, from + 3 * STEP);
		}
		return;
	}
	if (room >= 2 * STEP) {
		uint64_t fast = length < room - STEP ? length : room - STEP;
		uint64_t period = distance;
		uint8_t *stop = to + fast;

		length -= fast;
		/* Once it was repeated, there is twice as much to repeat. */
		while (period < STEP && to < stop) {
			copy_step(to, to - period);
			to += period;
			period *= 2;
		}
		for (; to < stop; to += STEP)
			copy_step(to, to - period);
		to = stop;
	}
	for (; length; length--, to++)
		*to = *(to - distance);
}

/* Copy literals; the caller has checked that both sides have as many. */
static inline void copy_literals(uint8_t *to, const uint8_t *from, uint64_t length,
				 const uint8_t *to_end, const uint8_t *from_end)
{
	if (length <= STEP && to_end - to >= STEP && from_end - from >= STEP)
		copy_step(to, from);
	else
		memcpy(to, from, length);
}

/* LZO1X. */

/* Add to a length what follows it: 255 for each byte of zero, then another byte. */
static inline int long_length(const uint8_t **from, const uint8_t *end, uint64_t *length)
{
	const uint8_t *at = *from;

	while (at < end && !*at) {
		*length += 255;
		at++;
	}
	if (at == end)
		return 0;
	*length += *at++;
	*from = at;
	return 1;
}

static int unpack_lzo(const uint8_t *in, const uint8_t *in_end, uint8_t *out,
		      uint8_t *out_end)
{
	uint8_t *to = out;
	/* How many literals the last instruction ended with: 4 is a run of any length. */
	unsigned int state = 0;

	if (in < in_end && *in > 17) {
		uint64_t length = *in++ - 17u;

		if (length > (uint64_t)(in_end - in) || length > (uint64_t)(out_end - to))
			return 0;
		copy_literals(to, in, length, out_end, in_end);
		in += length;
		to += length;
		state = length < 4 ? (unsigned int)length : 4;
	}
	for (;;) {
		uint64_t length, distance;
		unsigned int code;

		if (in == in_end)
			return 0;
		code = *in++;
		if (code < 16 && !state) {
			length = code;
			if (!code) {
				length = 15;
				if (!long_length(&in, in_end, &length))
					return 0;
			}
			length += 3;
			if (length > (uint64_t)(in_end - in) ||
			    length > (uint64_t)(out_end - to))
				return 0;
			copy_literals(to, in, length, out_end, in_end);
			in += length;
			to += length;
			state = 4;
			continue;
		}
		if (code >= 64 || code < 16) {
			if (in == in_end)
				return 0;
			if (code >= 64) {
				length = (code >> 5) + 1;
				distance = ((uint64_t)*in++ << 3) + (code >> 2 & 7) + 1;
			} else {
				length = state == 4 ? 3 : 2;
				distance = ((uint64_t)*in++ << 2) + (code >> 2) +
					   (state == 4 ? 2049 : 1);
			}
			state = code & 3;
		} else {
			unsigned int most = code >= 32 ? 31 : 7;

			length = code & most;
			if (!length) {
				length = most;
				if (!long_length(&in, in_end, &length))
					return 0;
			}
			length += 2;
			if (in_end - in < 2)
				return 0;
			distance = (uint64_t)(in[0] | in[1] << 8) >> 2;
			state = in[0] & 3;
			in += 2;
			if (code >= 32) {
				distance += 1;
			} else {
				distance += (uint64_t)(code & 8) << 11;
				if (!distance)
					return in == in_end && to == out_end;
				distance += 16384;
			}
		}
		if (distance > (uint64_t)(to - out) || length > (uint64_t)(out_end - to))
			return 0;
		copy_match(to, distance, length, out_end);
		to += length;
		if (state > (uint64_t)(in_end - in) || state > (uint64_t)(out_end - to))
			return 0;
		for (unsigned int i = 0; i < state; i++)
			*to++ = *in++;
	}
}

/* Snappy. */

static int unpack_snappy(const uint8_t *in, const uint8_t *in_end, uint8_t *out,
			 uint8_t *out_end)
{
	uint8_t *to = out;
	uint64_t size = 0;
	unsigned int shift = 0, byte;

	do {
		if (in == in_end || shift > 28)
			return 0;
		byte = *in++;
		size |= (uint64_t)(byte & 0x7f) << shift;
		shift += 7;
	} while (byte & 0x80);
	if (size != (uint64_t)(out_end - out))
		return 0;
	while (in < in_end) {
		unsigned int tag = *in++, kind = tag & 3;
		uint64_t length, distance;

		if (!kind) {
			unsigned int more = (tag >> 2) >= 60 ? (tag >> 2) - 59 : 0;

			length = tag >> 2;
			if (more > (uint64_t)(in_end - in))
				return 0;
			if (more) {
				length = 0;
				for (unsigned int i = 0; i < more; i++)
					length |= (uint64_t)*in++ << 8 * i;
			}
			length++;
			if (length > (uint64_t)(in_end - in) ||
			    length > (uint64_t)(out_end - to))
				return 0;
			copy_literals(to, in, length, out_end, in_end);
			in += length;
			to += length;
			continue;
		}
		unsigned int bytes = kind == 3 ? 4 : kind;

		if (bytes > (uint64_t)(in_end - in))
			return 0;
		distance = 0;
		for (unsigned int i = 0; i < bytes; i++)
			distance |= (uint64_t)*in++ << 8 * i;
		length = (tag >> 2) + 1;
		if (kind == 1) {
			length = (tag >> 2 & 7) + 4;
			distance |= (uint64_t)(tag >> 5) << 8;
		}
		if (!distance || distance > (uint64_t)(to - out) ||
		    length > (uint64_t)(out_end - to))
			return 0;
		copy_match(to, distance, length, out_end);
		to += length;
	}
	return to == out_end;
}

/* Zlib. */

#define LITERALS 288
#define DISTANCES 32
#define LENGTH_CODES 19
#define LONGEST 15

/* Bits by which the first table is looked up; longer codes continue in another. */
#define LITERAL_BITS 10
#define DISTANCE_BITS 8
#define LENGTH_BITS 7

/* Entries of both tables: more than any code needs, and checked. */
#define LITERAL_ROOM 2048
#define DISTANCE_ROOM 1024

/*
 * An entry has in bits 0 to 7 the length of the code together with the bits that follow it,
 * in bits 8 to 11 the length of the code alone, and from bit 16 on a literal, the base of a
 * length or of a distance, or where another table begins; its size is in bits 8 to 11.
 */
#define CODE_BIT 0x101u
#define LITERAL 0x8000u
#define SPECIAL 0x4000u /* no length and no distance: */
#define TABLE 0x2000u	/* continued in another table, */
#define END 0x1000u	/* end of the block, or else invalid. */

struct bits {
	const uint8_t *next, *end;
	uint64_t value;
	/* Valid bits in value, and how many of all were made up beyond the end. */
	int have, fake;
};

struct code {
	int literal_bits, distance_bits;
	uint32_t literals[LITERAL_ROOM], distances[DISTANCE_ROOM];
};

/* Have at least 56 bits. */
static inline void refill(struct bits *bits)
{
	if (bits->end - bits->next >= 8) {
		bits->value |= load64(bits->next) << bits->have;
		bits->next += (63 - bits->have) >> 3;
		bits->have |= 56;
		return;
	}
	while (bits->have <= 55) {
		if (bits->next < bits->end)
			bits->value |= (uint64_t)*bits->next++ << bits->have;
		else
			bits->fake += 8;
		bits->have += 8;
	}
}

static inline uint32_t take(struct bits *bits, unsigned int count)
{
	uint32_t taken = (uint32_t)(bits->value & ((1u << count) - 1));

	bits->value >>= count;
	bits->have -= (int)count;
	return taken;
}

/* The symbols that have a code: of most codes, a few. */
struct symbols {
	int count;
	uint16_t symbols[LITERALS];
	uint8_t lengths[LITERALS];
};

static inline void add(struct symbols *symbols, int symbol, uint32_t length)
{
	symbols->symbols[symbols->count] = (uint16_t)symbol;
	symbols->lengths[symbols->count++] = (uint8_t)length;
}

/*
 * Build the table of a code from its symbols, ascending, and the lengths of their codes, as
 * zlib accepts them: complete, or with a single code of one bit, or none.
 *
 * Returns the bits by which it is looked up, or 0.
 */
static int build(uint32_t *table, int room, int most, const struct symbols *symbols,
		 const uint32_t *meanings)
{
	uint16_t counts[LONGEST + 1] = {0}, ends[LONGEST + 1], sorted[LITERALS];
	int longest = LONGEST, left = 1, size, end, at = 0, start = 0, prefix = -1, wide = 0;
	uint32_t code = 0;

	for (int i = 0; i < symbols->count; i++)
		counts[symbols->lengths[i]]++;
	while (longest && !counts[longest])
		longest--;
	ends[0] = 0;
	for (int i = 1; i <= LONGEST; i++) {
		left = 2 * left - counts[i];
		if (left < 0)
			return 0;
		ends[i] = (uint16_t)(ends[i - 1] + counts[i - 1]);
	}
	if (left && longest > 1)
		return 0;
	for (int i = 0; i < symbols->count; i++)
		sorted[ends[symbols->lengths[i]]++] = symbols->symbols[i];
	if (left) {
		table[0] = table[1] = SPECIAL | CODE_BIT;
		if (longest)
			table[0] = meanings[sorted[0]] + CODE_BIT;
		return 1;
	}
	if (most > longest)
		most = longest;
	/* Codes begin with their lowest bit, so that they are counted from their highest. */
	end = 1 << most;
	size = 1;
	for (int length = 1; length <= longest; length++) {
		if (length <= most) {
			/* Shorter codes go on with either value of this bit. */
			memcpy(table + size, table, (size_t)size * sizeof(*table));
			size *= 2;
		}
		for (int i = 0; i < counts[length]; i++) {
			uint32_t entry = meanings[sorted[at++]] +
					 (uint32_t)length * CODE_BIT;
			uint32_t bit = 1u << (length - 1);

			if (length <= most) {
				table[code] = entry;
			} else {
				if ((int)(code & ((1u << most) - 1)) != prefix) {
					int used = counts[length] - i;

					prefix = (int)(code & ((1u << most) - 1));
					start = end;
					wide = length - most;
					while (used < 1 << wide && most + wide < longest)
						used = 2 * used + counts[most + ++wide];
					end += 1 << wide;
					if (end > room)
						return 0;
					table[prefix] = SPECIAL | TABLE |
							(uint32_t)wide << 8 |
							(uint32_t)start << 16;
				}
				for (uint32_t j = code >> most; j < 1u << wide;
				     j += 1u << (length - most))
					table[start + (int)j] = entry;
			}
			while (bit && code & bit) {
				code ^= bit;
				bit >>= 1;
			}
			code |= bit;
		}
	}
	return most;
}

struct inflater {
	uint32_t literal_meanings[LITERALS], distance_meanings[DISTANCES];
	uint32_t length_meanings[LENGTH_CODES];
	struct code fixed, dynamic;
	int has_fixed;
};

static void set_meanings(struct inflater *inflater)
{
	uint32_t base = 3;

	for (uint32_t i = 0; i < 256; i++)
		inflater->literal_meanings[i] = LITERAL | i << 16;
	inflater->literal_meanings[256] = SPECIAL | END;
	for (uint32_t i = 0; i < 28; i++) {
		uint32_t extra = i < 8 ? 0 : i / 4 - 1;

		inflater->literal_meanings[257 + i] = base << 16 | extra;
		base += 1u << extra;
	}
	inflater->literal_meanings[285] = 258u << 16;
	inflater->literal_meanings[286] = inflater->literal_meanings[287] = SPECIAL;
	base = 1;
	for (uint32_t i = 0; i < 30; i++) {
		uint32_t extra = i < 4 ? 0 : i / 2 - 1;

		inflater->distance_meanings[i] = base << 16 | extra;
		base += 1u << extra;
	}
	inflater->distance_meanings[30] = inflater->distance_meanings[31] = SPECIAL;
	for (uint32_t i = 0; i < LENGTH_CODES; i++)
		inflater->length_meanings[i] = i << 16;
	inflater->has_fixed = 0;
}

static const struct code *fixed_code(struct inflater *inflater)
{
	struct code *code = &inflater->fixed;
	struct symbols literals = {0}, distances = {0};

	if (inflater->has_fixed)
		return code;
	for (int i = 0; i < LITERALS; i++)
		add(&literals, i, i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8);
	code->literal_bits = build(code->literals, LITERAL_ROOM, LITERAL_BITS, &literals,
				   inflater->literal_meanings);
	for (int i = 0; i < DISTANCES; i++)
		add(&distances, i, 5);
	code->distance_bits = build(code->distances, DISTANCE_ROOM, DISTANCE_BITS,
				    &distances, inflater->distance_meanings);
	inflater->has_fixed = 1;
	return code;
}

/* Read the code of a block. Returns NULL if it is invalid. */
static const struct code *dynamic_code(struct inflater *inflater, struct bits *bits)
{
	static const uint8_t order[LENGTH_CODES] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
						    11, 4,  12, 3, 13, 2, 14, 1, 15};
	struct code *code = &inflater->dynamic;
	uint8_t code_lengths[LENGTH_CODES] = {0};
	struct symbols symbols[3];
	uint32_t table[1 << LENGTH_BITS], length = 0;
	int literals, distances, count, wide, sum = 0, at = 0, has_end = 0;

	refill(bits);
	literals = (int)take(bits, 5) + 257;
	distances = (int)take(bits, 5) + 1;
	count = (int)take(bits, 4) + 4;
	if (literals > 286 || distances > 30)
		return NULL;
	for (int i = 0; i < count; i++) {
		if (bits->have < 3)
			refill(bits);
		code_lengths[order[i]] = (uint8_t)take(bits, 3);
	}
	/* Unlike the other two, this code has to be complete. */
	for (int i = 0; i < 3; i++)
		symbols[i].count = 0;
	for (int i = 0; i < LENGTH_CODES; i++) {
		if (code_lengths[i]) {
			add(&symbols[2], i, code_lengths[i]);
			sum += 1 << LENGTH_BITS >> code_lengths[i];
		}
	}
	if (sum != 1 << LENGTH_BITS)
		return NULL;
	wide = build(table, 1 << LENGTH_BITS, LENGTH_BITS, &symbols[2],
		     inflater->length_meanings);
	if (!wide)
		return NULL;
	while (at < literals + distances) {
		uint32_t symbol, entry;
		int repeat = 1;

		if (bits->have < LENGTH_BITS + 7)
			refill(bits);
		entry = table[bits->value & ((1u << wide) - 1)];
		take(bits, entry & 0xff);
		symbol = entry >> 16;
		if (symbol < 16) {
			length = symbol;
		} else if (symbol == 16) {
			if (!at)
				return NULL;
			repeat = 3 + (int)take(bits, 2);
		} else {
			length = 0;
			repeat = symbol == 17 ? 3 + (int)take(bits, 3)
					      : 11 + (int)take(bits, 7);
		}
		if (repeat > literals + distances - at)
			return NULL;
		if (!length) {
			at += repeat;
			continue;
		}
		has_end |= at <= 256 && at + repeat > 256;
		for (; repeat; repeat--, at++) {
			if (at < literals)
				add(&symbols[0], at, length);
			else
				add(&symbols[1], at - literals, length);
		}
	}
	if (!has_end)
		return NULL;
	code->literal_bits = build(code->literals, LITERAL_ROOM, LITERAL_BITS, &symbols[0],
				   inflater->literal_meanings);
	code->distance_bits = build(code->distances, DISTANCE_ROOM, DISTANCE_BITS,
				    &symbols[1], inflater->distance_meanings);
	return code->literal_bits && code->distance_bits ? code : NULL;
}

/* Look a code up, and take it with the bits that follow it. */
static inline uint32_t decode(struct bits *bits, const uint32_t *table, int wide,
			      uint32_t *value)
{
	uint64_t all = bits->value;
	uint32_t entry = table[all & ((1u << wide) - 1)];

	if ((entry & (SPECIAL | TABLE)) == (SPECIAL | TABLE))
		entry = table[(entry >> 16) +
			      (all >> wide & ((1u << (entry >> 8 & 0xf)) - 1))];
	bits->value = all >> (entry & 0x3f);
	bits->have -= (int)(entry & 0x3f);
	*value = (entry >> 16) + (uint32_t)((all & ((1ull << (entry & 0x3f)) - 1)) >>
					    (entry >> 8 & 0xf));
	return entry;
}

/* Expand a compressed block. Returns its end in the page, or NULL. */
static uint8_t *expand(struct bits *from, const struct code *code, uint8_t *out,
		       uint8_t *to, uint8_t *out_end)
{
	struct bits bits = *from;

	for (;;) {
		uint32_t entry, length, distance;

		/* A length and a distance take 15 + 5 and 15 + 13. */
		refill(&bits);
		entry = decode(&bits, code->literals, code->literal_bits, &length);
		if (entry & LITERAL) {
			if (to == out_end)
				return NULL;
			*to++ = (uint8_t)length;
			continue;
		}
		if (entry & SPECIAL) {
			*from = bits;
			return entry & END ? to : NULL;
		}
		entry = decode(&bits, code->distances, code->distance_bits, &distance);
		if (entry & SPECIAL || distance > (uint64_t)(to - out) ||
		    length > (uint64_t)(out_end - to))
			return NULL;
		copy_match(to, distance, length, out_end);
		to += length;
	}
}

/* Go back to the first byte of which no bit was taken. Returns 0 if it is beyond the end. */
static int to_byte(struct bits *bits)
{
	int real = bits->have - bits->fake;

	if (real < 0)
		return 0;
	bits->next -= real >> 3;
	bits->value = 0;
	bits->have = bits->fake = 0;
	return 1;
}

/* Copy a stored block. Returns its end in the page, or NULL. */
static uint8_t *stored(struct bits *bits, uint8_t *to, uint8_t *out_end)
{
	const uint8_t *at;
	unsigned int length;

	if (!to_byte(bits) || bits->end - bits->next < 4)
		return NULL;
	at = bits->next;
	length = at[0] | (unsigned int)at[1] << 8;
	if ((length ^ 0xffff) != (at[2] | (unsigned int)at[3] << 8))
		return NULL;
	at += 4;
	if (length > bits->end - at || length > out_end - to)
		return NULL;
	memcpy(to, at, length);
	bits->next = at + length;
	return to + length;
}

#define ADLER 65521

/* Bytes of which the sums of sums fit 32 bits: 16 * 255 * n * (n - 1) / 2 for n of 16 each. */
#define ADLER_BYTES 4096

static uint32_t adler32(const uint8_t *data, uint64_t size)
{
	/* Each is reduced before it can overflow. */
	uint64_t low = 1, high = 0;

#ifdef __SSE2__
	const __m128i zero = _mm_setzero_si128();
	const __m128i left = _mm_set_epi16(9, 10, 11, 12, 13, 14, 15, 16);
	const __m128i right = _mm_set_epi16(1, 2, 3, 4, 5, 6, 7, 8);

	while (size >= 16) {
		uint64_t part = size < ADLER_BYTES ? size & ~15ull : ADLER_BYTES;
		/* Sums of the bytes, of these sums so far, and of bytes by their weight. */
		__m128i sums = zero, before = zero, weighted = zero;
		uint32_t all[3][4];

		high += low * part;
		size -= part;
		for (; part; part -= 16, data += 16) {
			__m128i bytes = _mm_loadu_si128((const __m128i *)data);

			before = _mm_add_epi32(before, sums);
			sums = _mm_add_epi32(sums, _mm_sad_epu8(bytes, zero));
			weighted = _mm_add_epi32(
				weighted, _mm_madd_epi16(_mm_unpacklo_epi8(bytes, zero), left));
			weighted = _mm_add_epi32(
				weighted, _mm_madd_epi16(_mm_unpackhi_epi8(bytes, zero), right));
		}
		_mm_storeu_si128((__m128i *)all[0], sums);
		_mm_storeu_si128((__m128i *)all[1], before);
		_mm_storeu_si128((__m128i *)all[2], weighted);
		for (int i = 0; i < 4; i++) {
			low += all[0][i];
			high += 16 * (uint64_t)all[1][i] + all[2][i];
		}
		low %= ADLER;
		high %= ADLER;
	}
#endif
	while (size) {
		uint64_t part = size < ADLER_BYTES ? size : ADLER_BYTES;

		size -= part;
		for (; part; part--) {
			low += *data++;
			high += low;
		}
		low %= ADLER;
		high %= ADLER;
	}
	return (uint32_t)(high << 16 | low);
}

static int unpack_zlib(struct inflater *inflater, const uint8_t *in, const uint8_t *in_end,
		       uint8_t *out, uint8_t *out_end)
{
	struct bits bits = {in + 2, in_end, 0, 0, 0};
	uint8_t *to = out;
	unsigned int last;

	/* Deflate with a window of at most 32 KiB, and no preset dictionary. */
	if (in_end - in < 2 || (in[0] & 0xf) != 8 || in[0] >> 4 > 7 || in[1] & 0x20 ||
	    (in[0] << 8 | in[1]) % 31)
		return 0;
	do {
		const struct code *code;

		refill(&bits);
		last = take(&bits, 1);
		switch (take(&bits, 2)) {
		case 0:
			to = stored(&bits, to, out_end);
			break;
		case 1:
			to = expand(&bits, fixed_code(inflater), out, to, out_end);
			break;
		case 2:
			code = dynamic_code(inflater, &bits);
			to = code ? expand(&bits, code, out, to, out_end) : NULL;
			break;
		default:
			return 0;
		}
		/* Blocks without content are bounded by what is left of the input. */
		if (!to || bits.have < bits.fake)
			return 0;
	} while (!last);
	if (to != out_end || !to_byte(&bits) || bits.end - bits.next < 4)
		return 0;
	in = bits.next;
	return adler32(out, (uint64_t)(out_end - out)) ==
	       ((uint32_t)in[0] << 24 | (uint32_t)in[1] << 16 | (uint32_t)in[2] << 8 | in[3]);
}

/* How the pages of a dump are stored; set by kdump_pages.py. */
struct method {
	int64_t kind; /* 1 zlib, 2 LZO1X, 4 snappy, 0x20 zstd: the flag in descriptors */
	int64_t page_size;
	int64_t file_size;
	/* Bytes that are better read in vain than by another system call. */
	int64_t gap;
	/* libzstd's ZSTD_decompressDCtx(), and its context. */
	size_t (*zstd)(void *context, void *to, size_t room, const void *from, size_t size);
	void *context;
	/* First bytes that each block of zstd has. */
	const uint8_t *start;
	int64_t start_size;
};

/* Where in the file a page is, and its row among all that are wanted. */
struct block {
	int64_t offset, size, flags, row;
};

/* Consecutive blocks, and the part of the file that has them. */
struct run {
	int64_t first, last, start, end;
};

/* States of pages, as in kdump_pages.py. */
enum { LEFT, HERE, CUT };

/* To be changed with the arguments of any function here, and in kdump_pages.py. */
int64_t msa_kdump_version(void)
{
	return 1;
}

/* Sort by offset; most dumps have their pages in order. */
static void sort(struct block *blocks, struct block *other, int64_t count)
{
	int64_t at = 0, half = count / 2, left = 0, right = half;

	while (at < count - 1 && blocks[at].offset <= blocks[at + 1].offset)
		at++;
	if (at >= count - 1)
		return;
	sort(blocks, other, half);
	sort(blocks + half, other, count - half);
	memcpy(other, blocks, (size_t)count * sizeof(*other));
	for (at = 0; at < count; at++)
		blocks[at] = right == count || (left < half &&
						other[left].offset <= other[right].offset)
				     ? other[left++]
				     : other[right++];
}

/*
 * Find where to read the pages of descriptors (struct page_desc of makedumpfile).
 *
 * words has three for each. blocks gets those that can be read here, by their offset, and
 * has room for twice as many as there are descriptors; runs for as many. states gets the
 * state of each. Returns the number of runs.
 */
int64_t msa_kdump_plan(const struct method *method, const int64_t *words, int64_t count,
		       struct block *blocks, struct run *runs, uint8_t *states)
{
	int64_t known = 0, found = 0;

	for (int64_t i = 0; i < count; i++, words += 3) {
		int64_t offset = words[0], size = words[1] & 0xffffffff;
		int64_t flags = words[1] >> 32 & 0xffffffff;

		/* An offset that is negative here is past the end of any file. */
		states[i] = LEFT;
		if (offset < 0 || (size && offset > method->file_size - size))
			states[i] = CUT;
		else if (flags ? flags == method->kind && size && size <= method->page_size
			       : size == method->page_size)
			blocks[known++] = (struct block){offset, size, flags, i};
	}
	sort(blocks, blocks + count, known);
	for (int64_t i = 0; i < known; i++) {
		int64_t end = blocks[i].offset + blocks[i].size;

		if (!i || blocks[i].offset - (blocks[i - 1].offset + blocks[i - 1].size) >
				  method->gap)
			runs[found++] = (struct run){i, i, blocks[i].offset, end};
		if (end > runs[found - 1].end)
			runs[found - 1].end = end;
		runs[found - 1].last = i + 1;
	}
	return found;
}

/*
 * Expand the pages of a run, of which data has size bytes of the file, fewer than planned if
 * the disk failed.
 *
 * out has a row for each descriptor: the page, or zeros and the state stays LEFT.
 */
void msa_kdump_unpack(const struct method *method, const uint8_t *data, int64_t start,
		      int64_t size, const struct block *blocks, int64_t count, uint8_t *out,
		      uint8_t *states)
{
	struct inflater inflater;
	size_t page_size = (size_t)method->page_size;

	if (method->kind == 1)
		set_meanings(&inflater);
	for (const struct block *block = blocks; block < blocks + count; block++) {
		const uint8_t *in = data, *in_end;
		uint8_t *to = out + (size_t)block->row * page_size, *end = to + page_size;
		int is_page = 0;

		if (block->offset < start || block->size > size ||
		    block->offset - start > size - block->size) {
			memset(to, 0, page_size);
			continue;
		}
		in += block->offset - start;
		in_end = in + block->size;
		if (!block->flags) {
			is_page = in_end - in == method->page_size;
			if (is_page)
				memcpy(to, in, page_size);
		} else if (method->kind == 1) {
			is_page = unpack_zlib(&inflater, in, in_end, to, end);
		} else if (method->kind == 2) {
			is_page = unpack_lzo(in, in_end, to, end);
		} else if (method->kind == 4) {
			is_page = unpack_snappy(in, in_end, to, end);
		} else if (method->zstd && in_end - in >= method->start_size &&
			   !memcmp(in, method->start, (size_t)method->start_size)) {
			is_page = method->zstd(method->context, to, page_size, in,
					       (size_t)(in_end - in)) == page_size;
		}
		states[block->row] = is_page ? HERE : LEFT;
		if (!is_page)
			memset(to, 0, page_size);
	}
}
