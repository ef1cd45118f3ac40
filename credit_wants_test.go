package rdmanet

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/smbdpeer"
)

// These are tests of the flag that says that payload waits for credits.

// answered asks for an answer, and returns its flags. The answer takes a credit that payload may
// not have.
func (s *joinScene) answered() uint16 {
	s.t.Helper()
	s.p.GrantWith(uint16(max(2-s.c.Stats().SendCredits, 0)), smbdpeer.FlagResponseRequested)
	h, payload, ok := s.p.ReceiveData()
	require.True(s.t, ok)
	require.Empty(s.t, payload)
	return h.Flags
}

// Messages say whether payload waits for credits, to peers that know such flags.
func TestSaysThatItWantsCredits(t *testing.T) {
	for name, tt := range map[string]struct{ features, flag uint16 }{
		"known":   {joinFeatures, smbdpeer.FlagWantsCredits},
		"unknown": {smbdpeer.FeatureFIN, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newJoinScene(t, tt.features, 0)
			s.exhaust()
			require.Zero(t, s.answered(), "nothing waits")
			s.write(20) // It joins.
			require.Equal(t, tt.flag, s.answered())
			wrote := writing(s.c, make([]byte, s.room+1))
			require.True(t, eventually(func() bool { return s.c.Stats().CreditStalls > 0 }))
			require.Equal(t, tt.flag, s.answered())
			s.grant(10)
			n := 0
			for n < 20+s.room+1 {
				h, payload, ok := s.p.ReceiveData()
				require.True(t, ok)
				require.Zero(t, h.Flags)
				n += len(payload)
			}
			require.Equal(t, result{s.room + 1, nil}, s.await(wrote))

			n = s.c.Stats().SendCredits - 2
			wrote = writing(s.c, make([]byte, (n+1)*s.room))
			for i := range n {
				h, _, ok := s.p.ReceiveData()
				require.True(t, ok)
				if i < n-1 {
					require.Zero(t, h.Flags)
				} else {
					require.Equal(t, tt.flag, h.Flags, "the last one before the writer waits")
				}
			}
			s.p.Close()
			<-wrote
		})
	}
}

// A send that would block is tried again as soon as there are credits, so the peer is told.
func TestWouldBlockWantsCredits(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 0)
	s.exhaust()
	_, err := s.c.WriteMsg(make([]byte, 30), NonBlocking)
	require.ErrorIs(t, err, syscall.EAGAIN)
	require.Equal(t, smbdpeer.FlagWantsCredits, s.answered())
	s.grant(10)
	_, err = s.c.WriteMsg(make([]byte, 30), NonBlocking)
	require.NoError(t, err)
	h, payload := s.receive()
	require.Len(t, payload, 30)
	require.Zero(t, h.Flags)
}

// A message that waits joins nothing, and its peer is told as well.
func TestMessageWantsCredits(t *testing.T) {
	s := newJoinScene(t, joinFeatures, 0)
	s.exhaust()
	sent := parked(t, func() { s.c.WriteMsg(make([]byte, 30)) })
	require.Equal(t, smbdpeer.FlagWantsCredits, s.answered())
	s.grant(10)
	_, payload := s.receive()
	require.Len(t, payload, 30)
	<-sent
	require.Zero(t, s.answered())
}

// A peer whose payload waits for credits gets more of them, if the reader keeps up, and is not
// asked for answers, which would take them.
func TestPeerWantsCredits(t *testing.T) {
	for name, tt := range map[string]struct {
		features uint16
		counts   bool
	}{
		"known":   {joinFeatures, true},
		"unknown": {smbdpeer.FeatureFIN, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newJoinScene(t, tt.features, plenty, func(cfg *Config) { cfg.InitialReceiveCredits, cfg.MaxReceiveCredits = 8, 32 })
			read := parked(t, func() { s.c.Read(make([]byte, 1)) })
			before := s.c.Stats()
			s.p.WaitCredit()
			s.p.GrantWith(1, smbdpeer.FlagWantsCredits)
			require.True(t, eventually(func() bool { return s.c.Stats().EmptyReceived > before.EmptyReceived }))
			after := s.c.Stats()
			if !tt.counts {
				require.Equal(t, before.ReceiveWindow, after.ReceiveWindow)
				s.burst()
				s.p.Close()
				<-read
				return
			}
			require.Equal(t, 2*before.ReceiveWindow, after.ReceiveWindow)
			for range 2 * askAfter {
				s.write(10)
				require.Zero(t, s.expect(10))
			}
			s.grant(2 * askAfter) // It wants none any more.
			s.burst()
			s.p.Close()
			<-read
		})
	}
}
