package iwarp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A peer may want an RDMA Read as the initiator's first message. Its answer is
// not taken for that of a Read that was posted behind it.
func TestReadBehindRTR(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		for _, size := range []int{0, 8} {
			leaktest.Check(t)
			v, p, result := dialingRaw(t, cfg)
			p.send(reply(0x8000|2, 0x4000|2))
			require.NoError(t, <-result)

			stag, to := v.read(size)
			for msn := range uint32(2) {
				h, _ := p.frame()
				require.Equal(t, iwarpwire.Header{Op: iwarpwire.ReadRequest, Last: true, QN: iwarpwire.QNReadRequest, MSN: msn + 1}, h)
			}
			if size == 0 {
				stag, to = 0, 0
			}
			p.send(seal(false, answerOf(1, 0, true, nil)))
			// The first answer has been dealt with when a message behind it is there.
			p.send(seal(false, sendOf(1, 0, true, nil)))
			require.Equal(t, map[uint64]ibv.WCStatus{0: ibv.WCSuccess}, v.completions(1))
			p.send(seal(false, answerOf(stag, to, true, bytesOf(size))))
			require.Equal(t, map[uint64]ibv.WCStatus{readID: ibv.WCSuccess}, v.completions(1))
			require.Equal(t, size, v.mem.touched())
			p.hangUp(false)
			require.NoError(t, v.event().Err)
			v.close()
			v.mem.close()
			p.drain()
		}
	})
}
