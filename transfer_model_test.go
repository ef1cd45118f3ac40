package rdmanet

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

var modelSteps = flag.Int("steps", 0, "writes that TestTransferModel makes each way; 0 stands for a few")

// modelStream is a stream without end whose bytes are known by their place.
type modelStream struct {
	data []byte
	at   int
}

const modelPeriod = 9<<20 + 7 // not a multiple of anything that is in use

func newModelStream(seed uint64) *modelStream {
	p := pattern(seed, modelPeriod)
	return &modelStream{data: append(p, p...)}
}

// peek returns the next n bytes.
func (m *modelStream) peek(n int) []byte { return m.data[m.at : m.at+n] }

func (m *modelStream) skip(n int) { m.at = (m.at + n) % modelPeriod }

// check takes the bytes that have come.
func (m *modelStream) check(b []byte) error {
	for len(b) > 0 {
		k := min(len(b), modelPeriod)
		want := m.peek(k)
		if !bytes.Equal(b[:k], want) {
			i := 0
			for b[i] == want[i] {
				i++
			}
			return defect.Wrong("byte %d of %d at %d of the stream is %#x and was %#x", i, len(b), m.at+i, b[i], want[i])
		}
		m.skip(k)
		b = b[k:]
	}
	return nil
}

// modelSize is a size up to 8 MiB: small ones are as likely as large ones.
func modelSize(r *rand.Rand) int {
	if r.IntN(20) == 0 {
		return 0
	}
	return r.IntN(1 << (1 + r.IntN(23)))
}

// modelMemory is one Buffer, or ordinary memory, for n bytes.
func modelMemory(r *rand.Rand, buf *Buffer, n int) []byte {
	if r.IntN(2) == 0 {
		return make([]byte, n)
	}
	at := r.IntN(len(buf.Bytes()) - n + 1)
	return buf.Bytes()[at : at+n]
}

type limitedReader struct {
	r *rand.Rand
	m *modelStream
	n int
}

func (l *limitedReader) Read(p []byte) (int, error) {
	if l.n == 0 {
		return 0, io.EOF
	}
	k := min(l.n, len(p), 1+l.r.IntN(1<<(1+l.r.IntN(20))))
	copy(p, l.m.peek(k))
	l.m.skip(k)
	l.n -= k
	return k, nil
}

// writeModel makes steps writes of all kinds and ends the stream.
func writeModel(c *Conn, seed uint64, steps int) (total int, err error) {
	r := rand.New(rand.NewPCG(seed, 1))
	m := newModelStream(seed)
	buf, err := Alloc(9 << 20)
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	var begun MsgFlags // of a message in pieces
	for range steps {
		n := modelSize(r)
		p := modelMemory(r, buf, n)
		copy(p, m.peek(n))
		k := r.IntN(8)
		if begun&Expedited != 0 {
			k = 0 // others would wait for the end
		}
		switch k {
		case 0, 1:
			flags := []MsgFlags{0, Partial, Expedited, Expedited | Partial}[r.IntN(4)]
			if begun != 0 {
				flags = flags&Partial | begun&Expedited
			}
			if n > 0 || flags&Partial == 0 { // else it is nothing
				begun = 0
				if flags&Partial != 0 {
					begun = flags
				}
			}
			var err error
			if r.IntN(4) == 0 {
				k, err = queueModel(c, r, p, flags)
			} else {
				k, err = c.WriteMsg(p, flags|MsgFlags(r.IntN(2))*NoResponse)
			}
			if err != nil || k != n {
				return total, fmt.Errorf("WriteMsg of %d bytes: %d, %w", n, k, err)
			}
			m.skip(n)
			total += n
		case 2:
			at := total
			k, err := c.ReadFrom(&limitedReader{r, m, n})
			if total += int(k); err != nil || total != at+n {
				return total, fmt.Errorf("ReadFrom of %d bytes: %d, %w", n, k, err)
			}
		case 3:
			c.SetWriteDeadline(time.Now().Add(time.Duration(r.IntN(3_000_000))))
			k, err := c.Write(p)
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return total, err
			}
			c.SetWriteDeadline(time.Time{})
			m.skip(k)
			total += k
		default:
			if k, err := c.Write(p); err != nil || k != n {
				return total, fmt.Errorf("Write of %d bytes: %d, %w", n, k, err)
			}
			m.skip(n)
			total += n
		}
		clear(p) // the memory is the caller's again
		if begun&Expedited == 0 {
			// Only the connection knows whether a Write or a ReadFrom has ended the message: one of no
			// bytes, or one that has missed its deadline, has not.
			c.mu.Lock()
			begun = 0
			if c.queue.partial { // Write has not ended it
				begun = Partial
			}
			c.unlock()
		}
	}
	if _, err := c.WriteMsg(nil, begun&Expedited); err != nil {
		return total, err
	}
	return total, c.CloseWrite()
}

// queueModel queues p in pieces and waits for all of them.
func queueModel(c *Conn, r *rand.Rand, p []byte, flags MsgFlags) (total int, err error) {
	var sends []*PendingMessage
	for len(sends) < 7 && len(p) > 1 && r.IntN(4) > 0 {
		k := 1 + r.IntN(len(p)-1)
		sends = append(sends, c.QueueMsg(p[:k], flags|Partial))
		p = p[k:]
	}
	for _, s := range append(sends, c.QueueMsg(p, flags)) {
		n, serr := s.Result()
		total += n
		err = errors.Join(err, serr)
	}
	return total, err
}

// readModel reads in all ways until the end.
func readModel(c *Conn, seed uint64) (total int, err error) {
	r := rand.New(rand.NewPCG(seed, 2))
	m := newModelStream(seed)
	buf, err := Alloc(9 << 20)
	if err != nil {
		return 0, err
	}
	defer buf.Free()
	for {
		p := modelMemory(r, buf, 1+modelSize(r))
		var n int
		var err error
		switch r.IntN(8) {
		case 0, 1, 2:
			if r.IntN(2) == 0 {
				n, err = c.ReadMsg(p)
			} else {
				n, _, err = c.ReadPiece(p)
			}
			if errors.Is(err, io.ErrShortBuffer) {
				err = nil
				if n > len(p) { // it stays whole; else this was a part of it
					n, err = c.Read(p)
				}
			}
		case 3:
			c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(3_000_000))))
			n, err = c.Read(p)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = nil
			}
			c.SetReadDeadline(time.Time{})
		default:
			n, err = c.Read(p)
		}
		if e := m.check(p[:n]); e != nil {
			return total, e
		}
		total += n
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// Whatever is written in whatever way, both ways at once, is what is read.
func TestTransferModel(t *testing.T) {
	for _, noRead := range []bool{false, true} {
		t.Run(fmt.Sprintf("NoRDMARead=%v", noRead), func(t *testing.T) {
			checkLeaks(t)
			steps := *modelSteps
			if steps == 0 {
				steps = heavy(160)
			}
			a, b := pipeOn(t, Config{TransferSize: 16 << 10, NoRDMARead: noRead})
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			type result struct {
				who   string
				total int
				err   error
			}
			results := make(chan result, 4)
			for i, c := range []*Conn{a, b} {
				go func() {
					n, err := writeModel(c, seed+uint64(i), steps)
					results <- result{fmt.Sprintf("writer %d", i), n, err}
				}()
				go func() {
					n, err := readModel(c, seed+1-uint64(i))
					results <- result{fmt.Sprintf("reader %d", 1-i), n, err}
				}()
			}
			totals := make(map[byte][]int)
			failed := false
			for range 4 {
				res := <-results
				if res.err != nil {
					t.Errorf("%s: %v", res.who, res.err)
					if !failed {
						failed = true
						a.Close()
						b.Close()
					}
				}
				k := res.who[len(res.who)-1]
				totals[k] = append(totals[k], res.total)
			}
			if failed {
				return
			}
			for k, v := range totals {
				require.Equal(t, v[0], v[1], "stream %c", k)
			}
			require.NotZero(t, a.Stats().TransfersSent)
			require.NoError(t, a.Close())
			require.NoError(t, b.Close())
		})
	}
}
