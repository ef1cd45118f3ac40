package capture

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/rdmanet/rdmanet/internal/pcaptest"
)

// frames returns the packets of a capture among the test data.
func frames(tb testing.TB, name string) []Packet {
	tb.Helper()
	file, err := os.Open(filepath.Join("..", "testdata", "captures", name))
	if err != nil {
		tb.Fatal(err)
	}
	defer file.Close()
	read, err := pcaptest.Read(file)
	if err != nil {
		tb.Fatal(err)
	}
	var ps []Packet
	for _, f := range read {
		ps = append(ps, Packet{Time: f.Time, Link: LinkEthernet, Data: f.Data})
	}
	return ps
}

// result is what a Reassembler made of packets.
type result struct {
	messages []Message
	uppers   []UpperMessage
	losses   []Loss
	stats    Stats
	left     int // bytes still accounted for that are not in reserve
}

// run has a Reassembler with that configuration take the packets.
func run(tb testing.TB, cfg Config, packets []Packet) *result {
	tb.Helper()
	res := &result{}
	cfg.Message = func(m *Message) {
		c := *m
		c.Data, c.Missing, c.head = bytes.Clone(m.Data), slices.Clone(m.Missing), nil
		if m.CM != nil {
			c.CM = m.CM.clone()
		}
		checkMessage(tb, &c, cfg.Data)
		res.messages = append(res.messages, c)
	}
	cfg.Upper = func(u *UpperMessage) { res.uppers = append(res.uppers, u.clone()) }
	cfg.Loss = func(l Loss) { res.losses = append(res.losses, l) }
	r := NewReassembler(cfg)
	for i := range packets {
		r.Add(&packets[i])
	}
	r.Flush()
	res.stats = r.Stats()
	for range r.Conns {
		tb.Error("a connection is left after Flush")
	}
	if n := len(r.flows) + len(r.streams) + len(r.pairs) + len(r.cm.conns) + r.conns; n != 0 {
		tb.Errorf("%d flows, streams or connections are left after Flush", n)
	}
	res.left = r.mem.used
	for _, b := range r.held {
		res.left -= cap(b)
	}
	for _, m := range r.ops {
		res.left -= m.buf.held()
	}
	if res.left != 0 {
		tb.Errorf("%d bytes of memory are still accounted for after Flush", res.left)
	}
	return res
}

// checkMessage holds a message against what its documentation promises.
func checkMessage(tb testing.TB, m *Message, data bool) {
	tb.Helper()
	gaps := uint64(0)
	for _, g := range m.Missing {
		if g.From >= g.To || g.To > m.Size {
			tb.Errorf("%v: missing %v of %d bytes", m.Kind, g, m.Size)
		}
		gaps += g.Len()
	}
	if m.Got+gaps != m.Size {
		tb.Errorf("%v: %d bytes there and %d missing of %d", m.Kind, m.Got, gaps, m.Size)
	}
	if m.Complete && (gaps > 0 || m.HeadLost || m.TailLost || m.Overflow) {
		tb.Errorf("%v is complete: %+v", m.Kind, m)
	}
	if data && m.Complete && m.Kind <= Read && uint64(len(m.Data)) != m.Size || uint64(len(m.Data)) > m.Size {
		tb.Errorf("%v: %d bytes of data for a size of %d", m.Kind, len(m.Data), m.Size)
	}
	for _, g := range m.Missing {
		if g.From < uint64(len(m.Data)) && len(bytes.Trim(m.Data[g.From:min(g.To, uint64(len(m.Data)))], "\x00")) > 0 {
			tb.Errorf("%v: bytes of %v are not zero", m.Kind, g)
		}
	}
}

// stream returns the bytes that rdmanet ends exchange in tests.
func stream(n int, seed byte) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}
