package iwarp

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// A peer that never pauses holds nobody in Wait: neither beyond a deadline nor
// when Wait is interrupted.
func TestWaitUnderEndlessTraffic(t *testing.T) {
	eachMode(t, func(t *testing.T, cfg Config) {
		leaktest.Check(t)
		s := newSite(t, cfg)
		mem := newMemory(t, s.p)
		v, p := s.connect(mem, false, 0)
		stopped := make(chan struct{})
		go func() { // until its connection is closed
			defer close(stopped)
			for traffic := bytes.Repeat(rtrFrame(false), 1<<15); ; {
				if _, err := p.conn.Write(traffic); err != nil {
					return
				}
			}
		}()
		waited := make(chan error, 1)
		wait := func(deadline time.Time) error {
			require.NoError(t, v.cq.Arm(false))
			go func() { waited <- v.cq.Wait(deadline) }()
			if deadline.IsZero() {
				v.cq.Interrupt()
			}
			select {
			case err := <-waited:
				return err
			case <-time.After(patience):
				return nil
			}
		}
		for range 3 {
			require.ErrorIs(t, wait(time.Now().Add(20*time.Millisecond)), os.ErrDeadlineExceeded)
			require.ErrorIs(t, wait(time.Time{}), ibv.ErrInterrupted)
		}
		v.close()
		<-stopped
		mem.close()
	})
}
