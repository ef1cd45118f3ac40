package ibv_test

import (
	"testing"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/printed/printedtest"
)

func TestPrinted(t *testing.T) {
	payload := printedtest.Payload(64 << 10)
	sgl := []ibv.SGE{{Buf: payload, LKey: 7}, {Buf: payload[:5]}}
	printedtest.Check(t, map[string]any{
		"SGE": sgl[0], "SendWR": ibv.SendWR{Op: ibv.OpWrite, SGL: sgl}, "RecvWR": ibv.RecvWR{SGL: sgl},
		"send to invalidate": ibv.SendWR{Op: ibv.OpSendInv, SGL: sgl},
		"ConnParam":          ibv.ConnParam{Private: payload[:500]}, "RejectError": &ibv.RejectError{Private: payload[:100], Text: "no"},
		"Access": ibv.AccessRemoteRead, "ProviderAttr": ibv.ProviderAttr{}, "Caps": ibv.CapSolicited, "DeviceAttr": ibv.DeviceAttr{}, "PortAttr": ibv.PortAttr{GIDs: make([]ibv.GID, 2)},
		"PortState": ibv.PortActive, "GID": ibv.GID{}, "Transport": ibv.TransportRoCE, "Event": ibv.Event{}, "EventKind": ibv.EventPortError,
		"AHAttr": ibv.AHAttr{}, "UDParam": ibv.UDParam{}, "JoinFlags": ibv.JoinFullMember, "WC": ibv.WC{}, "WCOpcode": ibv.WCSend,
		"WCFlags": ibv.WCWithImm, "WCStatus": ibv.WCSuccess, "WCError": ibv.WCError{}, "Opcode": ibv.OpSend, "SendFlags": ibv.SendInline,
		"QPCap": ibv.QPCap{}, "QPInit": ibv.QPInit{}, "QPState": ibv.QPState(2), "Quirks": ibv.Quirks{},
	})
}
