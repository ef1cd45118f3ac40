package iwarp

import (
	"bytes"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// inPlaceSize is more than the sockets on both sides hold.
const inPlaceSize = 1 << 20

// eachInPlace runs a test with a queue pair whose socket takes far less than inPlaceSize.
func eachInPlace(t *testing.T, run func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP)) {
	if !haveRawIO {
		t.Skip("no raw descriptors on this system, so that everything is copied")
	}
	for _, limit := range []int{128, 2000, 0} {
		leaktest.Check(t)
		s := newSite(t, Config{MaxFPDU: limit})
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 0)
		require.NoError(t, p.conn.SetReadBuffer(1<<16))
		require.NoError(t, socketOf(v.qp.(*qp).stream.Load()).conn.SetWriteBuffer(1<<16))
		run(t, v, p, v.qp.(ibv.InPlaceQP))
		v.close()
		mem.close()
		p.drain()
	}
}

// inline is a send of b.
func inline(b []byte) []ibv.SendWR {
	return []ibv.SendWR{{Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: b[:len(b)/2]}, {Buf: b[len(b)/2:]}}}}
}

// message reads a Send.
func (p *rawPeer) message() (got []byte) {
	p.t.Helper()
	for last := false; !last; {
		h, payload := p.frame()
		require.Equal(p.t, iwarpwire.Send, h.Op)
		got, last = append(got, payload...), h.Last
	}
	return got
}

// post posts b in place, of which the socket does not take all.
func (v *victim) post(b []byte) {
	v.t.Helper()
	n, lent, err := v.qp.(ibv.InPlaceQP).PostInPlace(inline(b))
	require.NoError(v.t, err)
	require.Equal(v.t, 1, n)
	require.True(v.t, lent)
}

// Requests that are posted in place when the stream has ended are all told to be left.
func TestPostInPlaceLate(t *testing.T) {
	for _, keep := range []bool{false, true} {
		eachInPlace(t, func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP) {
			require.NoError(t, v.qp.SetError())
			v.event()
			wrs := append(inline([]byte("some")), inline([]byte("more"))...)
			n, lent, err := q.PostInPlace(wrs)
			require.NoError(t, err)
			require.Equal(t, len(wrs), n, "they are flushed")
			require.True(t, lent)
			left, err := 0, error(nil)
			if keep {
				left, err = q.Keep()
			} else {
				left, err = q.Flush()
			}
			require.Error(t, err)
			require.Equal(t, len(wrs), left)
		})
	}
}

// What the socket takes at once is not lent, and what it does not take is sent by Flush from
// where it lies then. What others post meanwhile comes behind it.
func TestFlushSendsInPlace(t *testing.T) {
	eachInPlace(t, func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP) {
		_, lent, err := q.PostInPlace(inline([]byte("some bytes")))
		require.NoError(t, err)
		if lent { // until the peer's first frame has been seen
			left, err := q.Flush()
			require.NoError(t, err)
			require.Zero(t, left)
		}
		defect.Bytes(t, "some bytes", p.message())
		_, lent, err = q.PostInPlace(inline([]byte("more bytes")))
		require.NoError(t, err)
		require.False(t, lent)
		defect.Bytes(t, "more bytes", p.message())
		for i := range byte(3) {
			b := make([]byte, inPlaceSize)
			v.post(b)
			copy(b[len(b)/2:], bytes.Repeat([]byte{i}, len(b)/2)) // which is not copied yet
			note := []byte("a note")
			_, err := v.qp.PostSend(inline(note))
			require.NoError(t, err)
			copy(note, "nothin")
			flushed := make(chan error, 1)
			go func() {
				_, err := q.Flush()
				flushed <- err
			}()
			got := p.message()
			defect.Bytes(t, b[len(b)/2:], got[len(b)/2:])
			require.NoError(t, <-flushed)
			copy(b, bytes.Repeat([]byte{hostile}, len(b)))
			defect.Bytes(t, "a note", p.message())
		}
	})
}

// An interruption ends Flush, at whatever moment it comes. Then Flush can go on, or what is left
// is copied, so that the memory is the caller's.
func TestFlushInterrupt(t *testing.T) {
	for _, early := range []bool{false, true} {
		for _, keep := range []bool{false, true} {
			eachInPlace(t, func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP) {
				b := make([]byte, inPlaceSize)
				v.post(b)
				if early {
					q.FlushInterrupt()
				} else {
					time.AfterFunc(5*time.Millisecond, q.FlushInterrupt)
				}
				left, err := q.Flush()
				require.NoError(t, err)
				require.NotZero(t, left)
				if keep {
					_, err = q.Keep()
					require.NoError(t, err)
					copy(b, bytes.Repeat([]byte{hostile}, len(b)))
				}
				got := make(chan []byte, 1)
				if !keep {
					go func() { got <- p.message() }()
				}
				left, err = q.Flush()
				require.NoError(t, err)
				require.Zero(t, left)
				if keep {
					got <- p.message()
				}
				defect.Bytes(t, make([]byte, inPlaceSize), <-got)
				// Nothing of the interruption is left.
				go func() { got <- p.message() }()
				v.post(b)
				left, err = q.Flush()
				require.NoError(t, err)
				require.Zero(t, left)
				defect.Bytes(t, b, <-got)
			})
		}
	}
}

// A post in place behind what another post has left waits for the goroutine that sends that.
func TestFlushBehindOthers(t *testing.T) {
	eachInPlace(t, func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP) {
		first, second := make([]byte, inPlaceSize), bytes.Repeat([]byte{1}, 1000)
		_, err := v.qp.PostSend(inline(first))
		require.NoError(t, err)
		v.post(second)
		time.AfterFunc(time.Millisecond, q.FlushInterrupt)
		left, err := q.Flush()
		require.NoError(t, err)
		require.NotZero(t, left)
		flushed := make(chan error, 1)
		go func() {
			_, err := q.Flush()
			flushed <- err
		}()
		defect.Bytes(t, first, p.message())
		defect.Bytes(t, second, p.message())
		require.NoError(t, <-flushed)
	})
}

// The end of the connection ends Flush with an error, and so do later ones. The memory is the
// caller's then, whatever else is posted.
func TestFlushOfConnectionThatEnds(t *testing.T) {
	for _, end := range []func(v *victim, p *rawPeer){
		func(_ *victim, p *rawPeer) { p.hangUp(true) },
		func(v *victim, _ *rawPeer) { require.NoError(v.t, v.qp.SetError()) },
	} {
		for _, during := range []bool{false, true} {
			eachInPlace(t, func(t *testing.T, v *victim, p *rawPeer, q ibv.InPlaceQP) {
				b := make([]byte, inPlaceSize)
				v.post(b)
				if during {
					time.AfterFunc(5*time.Millisecond, func() { end(v, p) })
				} else {
					end(v, p)
				}
				_, err := q.Flush()
				require.Error(t, err)
				clear(b)
				b = nil
				runtime.GC()
				v.qp.PostSend(inline([]byte("later")))
				if _, lent, err := q.PostInPlace(inline([]byte("later"))); err == nil && lent {
					_, err = q.Flush()
					require.Error(t, err)
				}
				v.event()
			})
		}
	}
}
