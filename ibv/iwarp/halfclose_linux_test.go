package iwarp

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
)

// A reset behind the end of the peer's direction is found when this side ends its own. It is no
// orderly end, and nobody says that the peer has everything.
func TestResetBehindSendsClosed(t *testing.T) {
	eachHolding(t, func(t *testing.T, v *victim, p *rawPeer) {
		p.hangUp(false)
		v.sendsClosed()
		v.say(p, "everything up to here")
		p.hangUp(true)
		socket := socketOf(v.qp.(*qp).stream.Load())
		require.Eventually(t, func() (closed bool) { // The kernel has met it.
			socket.raw.Control(func(fd uintptr) {
				info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
				closed = err == nil && info.State == unix.BPF_TCP_CLOSE
			})
			return closed
		}, patience, time.Millisecond)
		if err := v.qp.(ibv.HoldingQP).CloseSends(); err != nil { // A goroutine of the device may find it later.
			require.ErrorIs(t, err, syscall.ECONNRESET)
		}
		require.ErrorIs(t, v.event().Err, syscall.ECONNRESET)
		v.acknowledged(ibv.AckUnknown)
	})
}
