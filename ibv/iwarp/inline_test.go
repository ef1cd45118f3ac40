package iwarp

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// Inline data is the poster's again when PostSend returns, wherever in the
// message the socket was full. With small frames all of what waits for the
// socket may be copies already, and the rest of the message not.
func TestInlineIsThePostersAgain(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		for _, limit := range []int{128, 1 << 10, 2000, 0} {
			leaktest.Check(t)
			cfg.MaxFPDU = limit
			s := newSite(t, cfg)
			mem := newMemory(t, s.p)
			v, p := s.connect(mem, false, 0)
			require.NoError(t, p.conn.SetReadBuffer(1<<18))
			require.NoError(t, socketOf(v.qp.(*qp).stream.Load()).conn.SetWriteBuffer(1<<16))
			const n, size = 12, 1 << 17 // more than the sockets on both sides hold
			buf := make([]byte, size)
			for i := range byte(n) {
				copy(buf, bytes.Repeat([]byte{i}, size))
				_, err := v.qp.PostSend([]ibv.SendWR{{Flags: ibv.SendInline, SGL: []ibv.SGE{{Buf: buf}}}})
				require.NoError(t, err)
				copy(buf, bytes.Repeat([]byte{hostile}, size))
			}
			for i := range byte(n) {
				var got []byte
				for last := false; !last; {
					h, payload := p.frame()
					require.Equal(t, iwarpwire.Send, h.Op)
					got, last = append(got, payload...), h.Last
				}
				defect.Bytes(t, bytes.Repeat([]byte{i}, size), got, "message %d was sent from memory that is the poster's again", i)
			}
			v.close()
			mem.close()
			p.drain()
		}
	})
}
