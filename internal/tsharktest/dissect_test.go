package tsharktest_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/tsharktest"
)

func kernelCapture(name string) string {
	return filepath.Join("..", "..", "testdata", "captures", name)
}

// Captures of the kernel talking to itself are found in order.
func TestDissect(t *testing.T) {
	tsharktest.Need(t)
	tally, _ := agree(t, kernelCapture("siw-crc-p2p-rping.pcap"))
	require.Equal(t, &tsharktest.Tally{
		Requests: map[int]int{2: 1}, Replies: map[int]int{2: 1},
		FPDUs: map[iwarpwire.Opcode]int{
			iwarpwire.Write: 7, iwarpwire.ReadRequest: 3, iwarpwire.ReadResponse: 6, iwarpwire.Send: 12},
		GoodCRC: 28,
	}, tally)
	tally, _ = agree(t, kernelCapture("siw-smbdirect-frag.pcap"))
	require.Equal(t, 95, tally.NoCRC)
	require.Equal(t, 2, tally.Negotiations)
	require.Equal(t, 93, tally.Messages)
}

// What is wrong with a capture shows: without that the other tests would say
// nothing.
func TestFaultsShow(t *testing.T) {
	tsharktest.Need(t)
	// edit returns the path of a copy in which the first old is new.
	edit := func(t *testing.T, name, old, new string) string {
		t.Helper()
		b, err := os.ReadFile(kernelCapture(name))
		require.NoError(t, err)
		require.True(t, bytes.Contains(b, []byte(old)))
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(new), 1), 0o644))
		return path
	}
	t.Run("CRC", func(t *testing.T) {
		tally := tsharktest.Dissect(t, edit(t, "siw-crc-p2p-rping.pcap", "rdma-ping-1", "rdma-pong-1"))
		require.Equal(t, 1, tally.BadCRC)
		require.Equal(t, 27, tally.GoodCRC)
	})
	t.Run("malformed", func(t *testing.T) {
		// A Send that says it is a Read Request, which is longer.
		const send, read = "\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01", "\x41\x41\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"
		tally := tsharktest.Dissect(t, edit(t, "siw-rping.pcap", send, read))
		require.Len(t, tally.Faults, 1)
	})
	t.Run("lost framing", func(t *testing.T) {
		// The length of the first FPDU, a Send of 16 bytes, is off by a frame's.
		want := tsharktest.Dissect(t, kernelCapture("siw-rping.pcap"))
		got := tsharktest.Dissect(t, edit(t, "siw-rping.pcap", "\x00\x22\x41\x43", "\x40\x22\x41\x43"))
		require.NotEqual(t, want.FPDUs, got.FPDUs)
	})
}
