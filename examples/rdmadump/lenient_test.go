package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// pcapRecords calls f with the header of each packet of a capture in pcap.
func pcapRecords(b []byte, f func(header []byte)) {
	for at := 24; at < len(b); {
		n := 16 + int(binary.LittleEndian.Uint32(b[at+8:]))
		f(b[at : at+16])
		at += n
	}
}

// ngBlocks calls f with each block of a capture in pcapng.
func ngBlocks(b []byte, f func(block []byte)) {
	for len(b) > 0 {
		n := binary.LittleEndian.Uint32(b[4:])
		f(b[:n])
		b = b[n:]
	}
}

// swapLengths has the two lengths of packets in the order of old versions of pcap.
func swapLengths(b []byte) []byte {
	pcapRecords(b, func(h []byte) {
		le := binary.LittleEndian
		captured := le.Uint32(h[8:])
		le.PutUint32(h[8:], le.Uint32(h[12:]))
		le.PutUint32(h[12:], captured)
	})
	return b
}

// kuznetzov adds to the header of each packet.
func kuznetzov(b []byte) []byte {
	le := binary.LittleEndian
	out := append([]byte(nil), b[:24]...)
	le.PutUint32(out, magicKuznetzov)
	for at := 24; at < len(b); {
		n := int(le.Uint32(b[at+8:]))
		out = append(out, b[at:at+16]...)
		out = append(out, 1, 0, 0, 0, 8, 0, 4, 0)
		out = append(out, b[at+16:at+16+n]...)
		at += 16 + n
	}
	return out
}

// ngBlock returns a block of pcapng.
func ngBlock(kind uint32, body []byte) []byte {
	le := binary.LittleEndian
	size := uint32(12 + len(body))
	b := le.AppendUint32(le.AppendUint32(nil, kind), size)
	return le.AppendUint32(append(b, body...), size)
}

// Captures that other tools read are read: the same packets are found in all of these.
func TestLenient(t *testing.T) {
	le, be := binary.LittleEndian, binary.BigEndian
	for _, tt := range []struct {
		name, form string
		change     func(b []byte) []byte
	}{
		{"shorter on the wire than what was captured", "pcap", func(b []byte) []byte {
			pcapRecords(b, func(h []byte) { le.PutUint32(h[12:], le.Uint32(h[8:])-4) })
			return b
		}},
		{"no length on the wire", "pcap", func(b []byte) []byte {
			pcapRecords(b, func(h []byte) { le.PutUint32(h[12:], 0) })
			return b
		}},
		{"version 2.2", "pcap", func(b []byte) []byte {
			le.PutUint16(b[6:], 2)
			return swapLengths(b)
		}},
		{"version 2.3", "pcap", func(b []byte) []byte {
			le.PutUint16(b[6:], 3)
			return b
		}},
		{"version 2.3, lengths swapped", "pcap", func(b []byte) []byte {
			le.PutUint16(b[6:], 3)
			return swapLengths(b)
		}},
		{"version 543.0", "pcap", func(b []byte) []byte {
			le.PutUint16(b[4:], 543)
			le.PutUint16(b[6:], 0)
			return swapLengths(b)
		}},
		{"version 2.5", "pcap", func(b []byte) []byte {
			le.PutUint16(b[6:], 5)
			return b
		}},
		{"Kuznetzov's headers", "pcap", kuznetzov},
		{"the other order of bytes, shorter on the wire", "pcap", func(b []byte) []byte {
			pcapRecords(b, func(h []byte) { le.PutUint32(h[12:], 1) })
			var headers [][]byte
			pcapRecords(b, func(h []byte) { headers = append(headers, h) })
			for _, h := range headers {
				for i := 0; i < 16; i += 4 {
					be.PutUint32(h[i:], le.Uint32(h[i:]))
				}
			}
			for i := 0; i < 24; i += 4 {
				if i != 4 {
					be.PutUint32(b[i:], le.Uint32(b[i:]))
				}
			}
			be.PutUint16(b[4:], 2)
			be.PutUint16(b[6:], 4)
			return b
		}},
		{"version 1.2", "ng", func(b []byte) []byte {
			le.PutUint16(b[14:], 2)
			return b
		}},
		{"old packet blocks", "ng", func(b []byte) []byte {
			ngBlocks(b, func(b []byte) {
				if le.Uint32(b) == ngPacket {
					le.PutUint32(b, ngOldPacket)
				}
			})
			return b
		}},
		{"statistics of an interface that is not there", "ng", func(b []byte) []byte {
			return slices.Insert(b, int(le.Uint32(b[4:])), ngBlock(ngStatistics, []byte{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})...)
		}},
		{"options of a packet that have no proper end", "ng", func(b []byte) []byte {
			var out []byte
			ngBlocks(b, func(b []byte) {
				if body := b[8 : len(b)-4]; le.Uint32(b) == ngPacket {
					b = ngBlock(ngPacket, append(bytes.Clone(body), 0, 0, 1, 0, 0, 0, 0, 0))
				}
				out = append(out, b...)
			})
			return out
		}},
		{"padding that no length counts", "ng", func(b []byte) []byte {
			ngBlocks(b, func(b []byte) {
				if pad := -le.Uint32(b[20:]) & 3; le.Uint32(b) == ngPacket && le.Uint32(b[4:]) == 32+le.Uint32(b[20:])+pad {
					le.PutUint32(b[4:], le.Uint32(b[4:])-pad)
				}
			})
			return b
		}},
	} {
		t.Run(tt.form+", "+tt.name, func(t *testing.T) {
			whole := rewrite(t, captureFile("rxe-write.pcap"), tt.form)
			if strings.HasPrefix(tt.name, "version") && tt.form == "pcap" {
				// Both lengths of a packet should not be the same.
				pcapRecords(whole, func(h []byte) { le.PutUint32(h[12:], le.Uint32(h[8:])+4) })
			}
			want, complaint, err := dump(t, options{}, bytes.NewReader(whole))
			if err != nil {
				t.Fatal(err)
			}
			changed := tt.change(bytes.Clone(whole))
			if bytes.Equal(changed, whole) {
				t.Fatal("nothing was changed")
			}
			got, complaints, err := dump(t, options{}, bytes.NewReader(changed))
			if err != nil || complaints != complaint || got != want {
				t.Errorf("%v, %q, %d lines, want %d", err, complaints, lines(got), lines(want))
			}
		})
	}
}

// A section of pcapng describes its interfaces. What that takes in memory is bounded.
func TestDescribedTooMuch(t *testing.T) {
	whole := rewrite(t, captureFile("rxe-write.pcap"), "ng")
	head := int(binary.LittleEndian.Uint32(whole[4:]))
	for name, body := range map[string][]byte{
		"interfaces": {1, 0, 0, 0, 0, 0, 0, 0},
		"names":      append([]byte{1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0x40}, make([]byte, 0x4000)...),
	} {
		block := ngBlock(ngInterface, body)
		_, _, err := dump(t, options{}, bytes.NewReader(slices.Insert(bytes.Clone(whole), head, bytes.Repeat(block, maxDescription/len(block))...)))
		if err == nil || !strings.Contains(err.Error(), "described") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// An error of the reader is reported wherever it comes, also if it comes once only.
func TestReadError(t *testing.T) {
	broken := errors.New("the disk is on fire")
	for _, form := range []string{"pcap", "ng"} {
		whole := rewrite(t, captureFile("rxe-write.pcap"), form)
		for n := 4; n < 400; n++ {
			in := io.MultiReader(bytes.NewReader(whole[:n]), iotest.ErrReader(broken))
			if _, _, err := dump(t, options{}, &once{r: in}); err == nil || !strings.Contains(err.Error(), broken.Error()) {
				t.Errorf("%s, behind %d bytes: %v", form, n, err)
			}
		}
	}
}

// once reports the error of r once, and then the end.
type once struct {
	r    io.Reader
	over bool
}

func (o *once) Read(b []byte) (int, error) {
	if o.over {
		return 0, io.EOF
	}
	n, err := o.r.Read(b)
	o.over = err != nil
	return n, err
}
