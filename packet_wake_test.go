package rdmanet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What happens while a reader polls is not slept over.
func TestPacketBusyPollNotices(t *testing.T) {
	onFabric(t, func(t *testing.T, pn packetNet) {
		pn.cfg.BusyPoll = 5 * time.Millisecond
		server := pn.listen(t)
		client := pn.dial(t, server.LocalAddr())
		_, err := client.Write([]byte("x"))
		require.NoError(t, err)
		readFrom(t, server)
		for i := range 40 {
			done := make(chan error, 1)
			go func() {
				_, _, err := server.ReadFrom(make([]byte, 10))
				done <- err
			}()
			<-time.After(time.Duration(i/2) * 500 * time.Microsecond) // before, at and after the end of a poll
			if i%2 == 0 {
				require.NoError(t, server.SetReadDeadline(past))
			} else {
				_, err := client.Write([]byte("x"))
				require.NoError(t, err)
			}
			within(t, "ReadFrom", func() { err = <-done })
			if i%2 == 0 {
				requireTimeout(t, err)
				require.NoError(t, server.SetReadDeadline(time.Time{}))
			} else {
				require.NoError(t, err)
			}
		}
	})
}
